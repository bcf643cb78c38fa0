"""The objectives by name, their options and defaults, and `build_objective`."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from nemo_sspo.errors import UserError
from nemo_sspo.objective import baselines
from nemo_sspo.objective.advantages import ADVANTAGES
from nemo_sspo.objective.corrections import RolloutCorrection
from nemo_sspo.objective.gates import GATES, find_gate
from nemo_sspo.objective.objective import Mean, Objective
from nemo_sspo.objective.options import Option, key, not_one_of, resolve
from nemo_sspo.objective.regularizers import KL_ESTIMATORS
from nemo_sspo.objective.sspo import PRESETS, sspo
from nemo_sspo.objective.types import Surrogate


@dataclass(frozen=True)
class ObjectiveSpec:
    """An entry of `OBJECTIVES`: the formula, its mean, the options of the formula, and one line for people."""

    formula: Callable[..., Surrogate]
    mean: Mean
    summary: str
    options: Mapping[str, Option] = field(default_factory=dict)
    advantages: str = "grpo"


def _clips(low: float, high: float) -> dict[str, Option]:
    return {
        "clip_low": Option(low, "non_negative", "distance from the on-policy point down to the lower clip"),
        "clip_high": Option(high, "non_negative", "distance from the on-policy point up to the upper clip"),
    }


def _temperatures(pos: float, neg: float) -> dict[str, Option]:
    return {
        "tau_pos": Option(pos, "positive", "temperature where the advantage is above 0; larger decays faster"),
        "tau_neg": Option(neg, "positive", "temperature elsewhere; at least tau_pos, so that negatives decay faster"),
    }


_LENGTH_SCALE = {"length_scale": Option(1.0, "positive", "a response's sum over tokens is divided by it, in tokens")}
_VESPO = {
    "k_pos": Option(2.0, "non_negative", "power of the sequence ratio where the advantage is above 0"),
    "lambda_pos": Option(3.0, "non_negative", "decay of the sequence ratio where the advantage is above 0"),
    "k_neg": Option(3.0, "non_negative", "power of the sequence ratio elsewhere"),
    "lambda_neg": Option(2.0, "non_negative", "decay of the sequence ratio elsewhere"),
}
_SSPO = {
    "gate": Option("atanlog", "gate", "a name in GATES"),
    "preset": Option(None, tuple(PRESETS), "names a pair of temperatures, instead of tau_pos and tau_neg"),
    **_temperatures(10 / 3, 5.0),
}

OBJECTIVES: dict[str, ObjectiveSpec] = {
    "sspo": ObjectiveSpec(sspo, "response_mean", "geometric mean of softly gated token ratios", _SSPO),
    "grpo": ObjectiveSpec(baselines.grpo, "response_mean", "clipped token ratios", _clips(0.2, 0.2)),
    "gspo": ObjectiveSpec(baselines.gspo, "response_mean", "clipped sequence ratio", _clips(3e-4, 4e-4)),
    "gspo_token": ObjectiveSpec(baselines.gspo_token, "response_mean", "GSPO written per token", _clips(3e-4, 4e-4)),
    "gmpo": ObjectiveSpec(baselines.gmpo, "response_mean", "geometric mean of clipped token ratios", _clips(0.4, 0.4)),
    "sapo": ObjectiveSpec(baselines.sapo, "response_mean", "softly gated token ratios", _temperatures(1.0, 1.05)),
    "cispo": ObjectiveSpec(baselines.cispo, "token_mean", "REINFORCE with clipped ratios as weights", _clips(1.0, 4.0)),
    "rloo": ObjectiveSpec(
        baselines.reinforce, "token_sum", "REINFORCE, leave-one-out advantages", _LENGTH_SCALE, advantages="rloo"
    ),
    "dapo": ObjectiveSpec(
        baselines.grpo, "token_mean", "GRPO with a higher upper clip, mean of tokens", _clips(0.2, 0.28)
    ),
    "dr_grpo": ObjectiveSpec(
        baselines.grpo,
        "token_sum",
        "GRPO without length and std normalisation",
        {**_clips(0.2, 0.2), **_LENGTH_SCALE},
        advantages="dr_grpo",
    ),
    "luspo": ObjectiveSpec(
        baselines.gspo, "token_sum", "GSPO weighted by length", {**_clips(2e-3, 2.5e-3), **_LENGTH_SCALE}
    ),
    "vespo": ObjectiveSpec(
        baselines.vespo, "token_mean", "REINFORCE with a Gamma weight of the sequence ratio", _VESPO
    ),
}
"""The objectives by name."""

COMMON_OPTIONS: dict[str, Option] = {
    "advantages": Option(None, ADVANTAGES, "the kind of group advantage; by default the objective's own"),
    "kl_coeff": Option(0.0, "non_negative", "weight of the divergence from the reference; needs reference_logprobs"),
    "kl_estimator": Option("k3", KL_ESTIMATORS, "how the divergence is estimated"),
    "entropy_coeff": Option(0.0, "non_negative", "weight of the entropy bonus; needs entropy"),
    "rollout_correction": Option(None, ("token_tis", "sequence_tis", "icepop"), "corrects for the engine's log-probs"),
    "rollout_cap": Option(2.0, "positive", "token_tis, sequence_tis: the largest ratio"),
    "rollout_low": Option(0.5, "non_negative", "icepop: the smallest ratio that is kept"),
    "rollout_high": Option(5.0, "positive", "icepop: the largest ratio that is kept"),
    "rollout_sequence_mask": Option(None, ("geometric", "max"), "leaves out responses with too large a gap"),
    "rollout_sequence_low": Option(None, "positive", "the mask's smallest ratio that is kept; by default no limit"),
    "rollout_sequence_high": Option(None, "positive", "the mask's largest ratio that is kept; by default no limit"),
    "check_finite": Option(True, "bool", "raise on non-finite inputs, at the cost of one wait for the device"),
}
"""What every objective takes."""


def build_objective(config: Mapping[str, Any]) -> Objective:
    """An objective from its name and options, such as `{"name": "sspo", "gate": "atanlog", "tau_pos": 10 / 3}`.

    config: `name`, a key of `OBJECTIVES`, and any of its options; an absent option or None takes the objective's own
    default. Returns a callable `Objective`.
    Errors: UserError, naming the key `model.grpo.objective.<option>`, for an unknown name or option, a wrong type, a
    temperature that is not above 0 or a clip that crosses the on-policy point. tau_neg < tau_pos warns.
    """
    given = dict(config)
    name = given.pop("name", None)
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise UserError(f"{key('name')}: {not_one_of(name, OBJECTIVES)}")
    spec = OBJECTIVES[name]
    options = resolve(name, given, {**spec.options, **COMMON_OPTIONS}, _all_options())
    if options.get("preset") is not None:
        options |= _preset(options["preset"], given)
    options["advantages"] = options["advantages"] or spec.advantages
    arguments = {option: options[option] for option in spec.options if option not in ("preset", "length_scale")}
    if "gate" in arguments:
        arguments["gate"] = find_gate(arguments["gate"])
    _warn(options, given)
    return Objective(
        name=name,
        options=options,
        formula=partial(spec.formula, **arguments),
        mean=spec.mean,
        advantages=options["advantages"],
        length_scale=options.get("length_scale", 1.0),
        kl_coeff=options["kl_coeff"],
        kl_estimator=options["kl_estimator"],
        entropy_coeff=options["entropy_coeff"],
        correction=_correction(options, given),
        check_finite=options["check_finite"],
    )


def _correction(options: Mapping[str, Any], given: Mapping[str, Any]) -> RolloutCorrection:
    """The `rollout_*` options as one object; UserError for a bound that would have no effect, or bounds that cross."""
    uses = {
        "rollout_cap": options["rollout_correction"] in ("token_tis", "sequence_tis"),
        "rollout_low": options["rollout_correction"] == "icepop",
        "rollout_high": options["rollout_correction"] == "icepop",
        "rollout_sequence_low": options["rollout_sequence_mask"] is not None,
        "rollout_sequence_high": options["rollout_sequence_mask"] is not None,
    }
    for option, used in uses.items():
        if given.get(option) is not None and not used:
            switch = "rollout_sequence_mask" if "sequence" in option else "rollout_correction"
            raise UserError(
                f"{key(option)}: has no effect with {key(switch)}={options[switch]}; set that, or remove it."
            )
    low, high = options["rollout_sequence_low"], options["rollout_sequence_high"]
    if options["rollout_sequence_mask"] is not None and low is None and high is None:
        raise UserError(f"{key('rollout_sequence_mask')}: needs rollout_sequence_low, rollout_sequence_high or both.")
    correction = RolloutCorrection(
        correction=options["rollout_correction"],
        cap=options["rollout_cap"],
        low=options["rollout_low"],
        high=options["rollout_high"],
        mask=options["rollout_sequence_mask"],
        mask_low=0.0 if low is None else low,
        mask_high=math.inf if high is None else high,
    )
    for prefix, low, high in (
        ("rollout", correction.low, correction.high),
        ("rollout_sequence", correction.mask_low, correction.mask_high),
    ):
        if low > high:
            raise UserError(f"{key(prefix + '_low')}: {low:g} given; allowed: at most {prefix}_high = {high:g}.")
    return correction


def _all_options() -> set[str]:
    return set(COMMON_OPTIONS).union(*(spec.options for spec in OBJECTIVES.values()))


def _preset(preset: str, given: Mapping[str, Any]) -> dict[str, float]:
    for option in PRESETS[preset]:
        if given.get(option) is not None:
            raise UserError(f"{key('preset')}: {preset!r} sets {option}, which is given as well; give one of the two.")
    return PRESETS[preset]


def _warn(options: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if "tau_neg" in options and options["tau_neg"] < options["tau_pos"]:
        warnings.warn(
            f"{key('tau_neg')}={options['tau_neg']:g} is below {key('tau_pos')}={options['tau_pos']:g}: negative "
            "advantages then decay more slowly than positive ones, the opposite of what the paper advises.",
            stacklevel=3,
        )
    if "gate" in options and not GATES[options["gate"]].uses_tau:
        for option in ("preset", "tau_pos", "tau_neg"):
            if given.get(option) is not None:
                warnings.warn(f"{key(option)}: the gate {options['gate']!r} has no temperature.", stacklevel=3)
