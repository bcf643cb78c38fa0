"""How the objectives are related: the identities of the SSPO paper and of its baselines."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor

from nemo_sspo.objective import OBJECTIVES, Gate, Objective, build_objective
from nemo_sspo.objective.sspo import sspo

IDENTITY = Gate("rho", lambda x, tau: x, lambda x, tau: torch.ones_like(x), "iii.2", uses_tau=False)
NO_CLIP = {"clip_low": 1e9, "clip_high": 1e9}


def hard_clip(epsilon: float) -> Gate:
    """GMPO's clip as a gate; its "temperature" is the sign of the advantage."""

    def log_f(x: Tensor, sign: Tensor) -> Tensor:
        return sign * torch.minimum(sign * x, sign * x.clamp(-epsilon, epsilon))

    return Gate("hard", log_f, lambda x, sign: (sign * x <= epsilon).to(x.dtype), "iii.2")


def sspo_with(gate: Gate, tau_pos: float = 1.0, tau_neg: float = 1.0) -> Objective:
    return replace(
        build_objective({"name": "sspo"}), formula=partial(sspo, gate=gate, tau_pos=tau_pos, tau_neg=tau_neg)
    )


def batch(spread: float = 0.6):
    generator = torch.Generator().manual_seed(1)
    old = -torch.rand(6, 8, generator=generator, dtype=torch.float64)
    policy = old + spread * torch.randn(6, 8, generator=generator, dtype=torch.float64)
    mask = torch.rand(6, 8, generator=generator) < 0.8
    advantages = torch.randn(6, generator=generator, dtype=torch.float64)
    return policy.requires_grad_(), old, advantages, mask


def both(objective: Objective, arguments) -> tuple[Tensor, Tensor]:
    loss = objective(*arguments).loss
    return loss.detach(), torch.autograd.grad(loss, arguments[0])[0]


def assert_same(first: Objective, second: Objective, arguments, rtol: float = 1e-12) -> None:
    for got, expected in zip(both(first, arguments), both(second, arguments), strict=True):
        torch.testing.assert_close(got, expected, rtol=rtol, atol=rtol * 1e-2)


def test_with_f_equal_rho_sspo_is_gspo_without_its_clip():
    assert_same(sspo_with(IDENTITY), build_objective({"name": "gspo", **NO_CLIP}), batch())


def test_with_a_hard_clip_as_gate_sspo_is_gmpo():
    clip = build_objective({"name": "gmpo", "clip_low": 0.3, "clip_high": 0.3})
    assert_same(sspo_with(hard_clip(0.3), 1.0, -1.0), clip, batch())
    assert clip(*batch()).metrics["gate_weight/attenuated_fraction"] > 0.1


def test_gmpo_without_its_clip_is_gspo_without_its_clip():
    assert_same(build_objective({"name": "gmpo", **NO_CLIP}), build_objective({"name": "gspo", **NO_CLIP}), batch())


def test_as_tau_vanishes_atanlog_becomes_rho():
    errors = []
    for tau in (1e-1, 1e-2, 1e-3):
        soft = build_objective({"name": "sspo", "tau_pos": tau, "tau_neg": tau})
        errors.append(float((both(soft, batch())[1] - both(sspo_with(IDENTITY), batch())[1]).abs().max()))
    assert errors[0] > 1e-5
    assert errors[1] < errors[0] / 50
    assert errors[2] < errors[1] / 50


def test_gspo_token_is_gspo_when_a_response_has_one_advantage():
    clips = {"clip_low": 0.1, "clip_high": 0.1}
    assert_same(
        build_objective({"name": "gspo_token", **clips}), build_objective({"name": "gspo", **clips}), batch(), 1e-10
    )


def test_dapo_and_dr_grpo_are_grpo_with_another_mean():
    policy, old, advantages, _ = batch()
    arguments = (policy, old, advantages, torch.ones(6, 8))
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    grpo = build_objective({"name": "grpo", **clips})
    assert_same(build_objective({"name": "dapo"}), grpo, arguments)
    assert_same(build_objective({"name": "dr_grpo", **clips, "length_scale": 8.0}), grpo, arguments)


def test_luspo_is_gspo_times_the_length():
    policy, old, advantages, _ = batch()
    arguments = (policy, old, advantages, torch.ones(6, 8))
    clips = {"clip_low": 0.1, "clip_high": 0.1}
    assert_same(
        build_objective({"name": "luspo", **clips, "length_scale": 8.0}),
        build_objective({"name": "gspo", **clips}),
        arguments,
    )


def test_the_weights_of_sapo_are_those_of_expsig():
    sapo = build_objective({"name": "sapo", "tau_pos": 2.0, "tau_neg": 3.0})
    gated = build_objective({"name": "sspo", "gate": "expsig", "tau_pos": 2.0, "tau_neg": 3.0})
    torch.testing.assert_close(sapo.token_weights(*batch()), gated.token_weights(*batch()))


@pytest.mark.parametrize(
    "options",
    [{"name": n} for n in OBJECTIVES]
    + [{"name": "sspo", "gate": g} for g in ("expsig", "expatan", "gumbel", "siglog")],
    ids=str,
)
def test_on_policy_every_gradient_is_the_group_policy_gradient(options):
    """At pi = pi_old the gradient of token t is -A_i c_i, with c_i the objective's own length weighting."""
    _, old, advantages, mask = batch()
    objective = build_objective(options)
    policy = old.clone().requires_grad_()
    _, gradient = both(objective, (policy, old, advantages, mask))
    lengths = mask.sum(1)
    scale = {
        "response_mean": 1 / (len(lengths) * lengths),
        "token_mean": torch.full((6,), 1 / float(lengths.sum())),
        "token_sum": torch.full((6,), 1 / len(lengths)),
    }[objective.mean]
    torch.testing.assert_close(gradient, -(advantages * scale)[:, None] * mask, rtol=1e-6, atol=1e-12)
    metrics = objective(policy, old, advantages, mask).metrics
    assert metrics["gate_weight/mean"].item() == pytest.approx(1.0)
    assert metrics["gate_weight/attenuated_fraction"].item() == 0.0
    assert metrics["effective_sample_size"].item() == pytest.approx(1.0)


@pytest.mark.parametrize("options", [{"name": n} for n in OBJECTIVES], ids=str)
def test_the_gradient_is_the_product_of_its_weights(options):
    """grad of token t = -A_i s_i w_t c_i: what token_weights and sequence_weight say is what the loss does."""
    arguments = batch(spread=0.2)
    objective = build_objective(options)
    policy, old, advantages, mask = arguments
    _, gradient = both(objective, arguments)
    inputs = objective._inputs(policy.detach(), old, advantages, mask, None, None)
    surrogate = objective.formula(inputs)
    lengths = inputs.layout.lengths
    scale = {
        "response_mean": 1 / (len(lengths) * lengths),
        "token_mean": 1 / lengths.sum().expand(6),
        "token_sum": torch.full_like(lengths, 1 / len(lengths)),
    }[objective.mean]
    expected = -(advantages * surrogate.sequence_weight * scale)[:, None] * objective.token_weights(*arguments)
    torch.testing.assert_close(gradient, expected, rtol=1e-10, atol=1e-14)


def test_larger_temperatures_decay_faster_so_negative_advantages_do():
    x = torch.linspace(0.05, 3, 60, dtype=torch.float64)
    for gate in ("expatan", "siglog", "atanlog"):
        objective = build_objective({"name": "sspo", "gate": gate})
        assert (objective.weight_curve(x, -1) < objective.weight_curve(x, +1)).all()
