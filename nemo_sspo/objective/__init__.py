"""Soft Sequence Policy Optimization and the objectives it is compared with: pure torch, no config, no process group.

    objective = build_objective({"name": "sspo", "gate": "atanlog", "tau_pos": 10 / 3, "tau_neg": 5.0})
    out = objective(policy_logprobs, old_logprobs, advantages, mask)
    out.loss.backward()

Read in this order: gates, sspo, baselines, objective, registry; then layout, statistics, advantages.
"""

from nemo_sspo.objective.advantages import ADVANTAGES, count_equal_groups, group_advantages
from nemo_sspo.objective.conditions import ConditionReport, check_conditions, register_gate
from nemo_sspo.objective.gates import GATES, Gate, bounded_exp, gate_weight, log_gate
from nemo_sspo.objective.objective import Objective
from nemo_sspo.objective.registry import OBJECTIVES, build_objective
from nemo_sspo.objective.regularizers import kl_estimate
from nemo_sspo.objective.statistics import Statistics
from nemo_sspo.objective.types import ObjectiveOutput

__all__ = [
    "ADVANTAGES",
    "GATES",
    "OBJECTIVES",
    "ConditionReport",
    "Gate",
    "Objective",
    "ObjectiveOutput",
    "Statistics",
    "bounded_exp",
    "build_objective",
    "check_conditions",
    "count_equal_groups",
    "gate_weight",
    "group_advantages",
    "kl_estimate",
    "log_gate",
    "register_gate",
]
