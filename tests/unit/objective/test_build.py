"""build_objective: names, options, defaults, and the words of its errors."""

from __future__ import annotations

import math
import warnings

import pytest

from nemo_sspo.errors import UserError
from nemo_sspo.objective import OBJECTIVES, build_objective

NAMES = "sspo grpo gspo gspo_token gmpo sapo cispo rloo dapo dr_grpo luspo vespo".split()
EVERY_KEY_NULL = {
    "gate": None,
    "tau_pos": None,
    "tau_neg": None,
    "clip_low": None,
    "clip_high": None,
    "preset": None,
    "kl_coeff": None,
    "advantages": None,
}


def test_names():
    assert sorted(OBJECTIVES) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_config_with_every_key_null_takes_the_objectives_defaults(name):
    assert build_objective({"name": name, **EVERY_KEY_NULL}).options == build_objective({"name": name}).options


@pytest.mark.parametrize(
    ("name", "defaults"),
    [
        ("sspo", {"gate": "atanlog", "tau_pos": 10 / 3, "tau_neg": 5.0}),
        ("grpo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("gspo", {"clip_low": 3e-4, "clip_high": 4e-4}),
        ("gspo_token", {"clip_low": 3e-4, "clip_high": 4e-4}),
        ("gmpo", {"clip_low": 0.4, "clip_high": 0.4}),
        ("sapo", {"tau_pos": 1.0, "tau_neg": 1.05}),
        ("cispo", {"clip_low": 1.0, "clip_high": 4.0}),
        ("rloo", {"length_scale": 1.0, "advantages": "rloo"}),
        ("dapo", {"clip_low": 0.2, "clip_high": 0.28, "advantages": "grpo"}),
        ("dr_grpo", {"clip_low": 0.2, "clip_high": 0.2, "advantages": "dr_grpo"}),
        ("luspo", {"clip_low": 2e-3, "clip_high": 2.5e-3}),
        ("vespo", {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}),
    ],
)
def test_defaults(name, defaults):
    options = build_objective({"name": name}).options
    assert {key: options[key] for key in defaults} == defaults
    assert (options["kl_coeff"], options["entropy_coeff"], options["rollout_correction"]) == (0.0, 0.0, None)


def test_presets():
    literal = build_objective({"name": "sspo", "preset": "paper_literal"}).options
    scale = build_objective({"name": "sspo", "preset": "paper_scale"}).options
    assert (literal["tau_pos"], literal["tau_neg"]) == (0.2, 0.3)
    assert (scale["tau_pos"], scale["tau_neg"]) == pytest.approx((10 / 3, 5.0))


def test_the_kind_of_advantages_can_be_set():
    assert build_objective({"name": "rloo", "advantages": "grpo"}).advantages == "grpo"
    assert build_objective({"name": "rloo"}).advantages == "rloo"


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"name": "ssop"}, ["objective.name: unknown 'ssop'", "sspo, grpo", "Did you mean 'sspo'"]),
        ({}, ["objective.name: unknown None", "sspo, grpo"]),
        ({"name": ["sspo"]}, ["objective.name: unknown ['sspo']"]),
        ({"name": "sspo", "tau_positive": 1.0}, ["objective.tau_positive: unknown option", "'tau_pos'"]),
        ({"name": "sspo", "tau_positive": None}, ["objective.tau_positive: unknown option"]),
        ({"name": "grpo", "gate": "atanlog"}, ["objective.gate: grpo has no such option", "clip_low, clip_high"]),
        ({"name": "sspo", "gate": "atanlgo"}, ["objective.gate: unknown 'atanlgo'", "Did you mean 'atanlog'"]),
        ({"name": "sspo", "gate": 3}, ["objective.gate: unknown 3", "atanlog"]),
        ({"name": "sspo", "tau_pos": 0}, ["objective.tau_pos: 0 given", "above 0"]),
        ({"name": "sspo", "tau_neg": -1.0}, ["objective.tau_neg: -1.0 given", "above 0"]),
        ({"name": "sspo", "tau_neg": math.inf}, ["objective.tau_neg: inf given", "finite"]),
        ({"name": "sspo", "tau_neg": math.nan}, ["objective.tau_neg: nan given", "finite"]),
        ({"name": "sspo", "tau_neg": "5"}, ["objective.tau_neg: '5' given", "number"]),
        ({"name": "sspo", "tau_neg": True}, ["objective.tau_neg: True given", "number"]),
        ({"name": "sspo", "preset": "paper"}, ["objective.preset: unknown 'paper'", "paper_literal, paper_scale"]),
        ({"name": "sspo", "preset": "paper_scale", "tau_pos": 1.0}, ["objective.preset", "tau_pos", "one of the two"]),
        ({"name": "grpo", "clip_low": -0.3}, ["objective.clip_low: -0.3 given", "at least 0"]),
        ({"name": "grpo", "clip_high": -0.3}, ["objective.clip_high: -0.3 given", "at least 0"]),
        ({"name": "grpo", "check_finite": 1}, ["objective.check_finite: 1 given", "true or false"]),
        ({"name": "grpo", "advantages": "z"}, ["objective.advantages: unknown 'z'", "grpo, rloo, dr_grpo"]),
        ({"name": "grpo", "kl_estimator": "k4"}, ["objective.kl_estimator: unknown 'k4'", "k1, k2, k3"]),
        ({"name": "rloo", "length_scale": 0}, ["objective.length_scale: 0 given", "above 0"]),
        ({"name": "sspo", "rollout_correction": "tis"}, ["objective.rollout_correction: unknown 'tis'", "token_tis"]),
        ({"name": "sspo", "rollout_cap": 2.0}, ["objective.rollout_cap: has no effect", "rollout_correction=None"]),
        (
            {"name": "sspo", "rollout_correction": "token_tis", "rollout_low": 0.5},
            ["objective.rollout_low: has no effect", "rollout_correction=token_tis"],
        ),
        (
            {"name": "sspo", "rollout_correction": "icepop", "rollout_low": 6.0},
            ["objective.rollout_low: 6 given", "at most rollout_high = 5"],
        ),
        (
            {"name": "sspo", "rollout_sequence_mask": "max"},
            ["objective.rollout_sequence_mask: needs rollout_sequence_low, rollout_sequence_high"],
        ),
        (
            {"name": "sspo", "rollout_sequence_mask": "max", "rollout_sequence_low": 2.0, "rollout_sequence_high": 1.0},
            ["objective.rollout_sequence_low: 2 given", "at most rollout_sequence_high = 1"],
        ),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_mistakes_name_the_key_and_what_is_allowed(config, words):
    with pytest.raises(UserError) as error:
        build_objective(config)
    message = str(error.value)
    assert message.startswith("model.grpo.objective.")
    assert "\n" not in message
    for word in words:
        assert word in message


def test_warnings():
    with pytest.warns(UserWarning, match="negative advantages then decay more slowly"):
        build_objective({"name": "sspo", "tau_pos": 2.0, "tau_neg": 1.0})
    with pytest.warns(UserWarning, match="'gumbel' has no temperature"):
        build_objective({"name": "sspo", "gate": "gumbel", "tau_pos": 2.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for name in NAMES:
            build_objective({"name": name})
        build_objective({"name": "sspo", "gate": "gumbel"})


def test_the_config_is_not_changed():
    config = {"name": "sspo", "tau_pos": 3}
    build_objective(config)
    assert config == {"name": "sspo", "tau_pos": 3}
