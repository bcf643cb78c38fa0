"""Which layouts fit a number of GPUs, and about how fast they are. Plain arithmetic: imports no torch."""

from nemo_sspo.plan.job import job_of, load_plan_config
from nemo_sspo.plan.layout import Layout
from nemo_sspo.plan.memory import Job, Memory, layout_memory, stage_memory
from nemo_sspo.plan.possible import possible_layouts
from nemo_sspo.plan.ranking import Plan, memory_warning, rank

__all__ = [
    "Job",
    "Layout",
    "Memory",
    "Plan",
    "job_of",
    "layout_memory",
    "load_plan_config",
    "memory_warning",
    "possible_layouts",
    "rank",
    "stage_memory",
]
