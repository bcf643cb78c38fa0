"""Corrections for the engine's gap, by value; and the estimators of the divergence."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_sspo.objective import build_objective, kl_estimate

LOG2 = math.log(2)
OLD = torch.full((2, 2), -2.0, dtype=torch.float64)
GAP = torch.tensor([[2 * LOG2, -2 * LOG2], [math.log(1.8), 0.0]], dtype=torch.float64)  # ratios 4, 1/4; 1.8, 1
ADVANTAGES = torch.tensor([1.0, -2.0])
MASK = torch.ones(2, 2)

CASES = [
    ({"rollout_correction": "token_tis"}, [[2, 0.25], [1.8, 1]], {"truncated_token_fraction": 1 / 4}),
    (
        {"rollout_correction": "sequence_tis", "rollout_cap": 1.5},
        [[1, 1], [1.5, 1.5]],
        {"truncated_response_fraction": 1 / 2},
    ),
    (
        {"rollout_correction": "icepop", "rollout_high": 3.0},
        [[0, 0], [1.8, 1]],
        {"masked_token_fraction": 2 / 4},
    ),
    (
        {"rollout_sequence_mask": "geometric", "rollout_sequence_low": 0.8, "rollout_sequence_high": 1.2},
        [[1, 1], [0, 0]],
        {"masked_response_fraction": 1 / 2},
    ),
    (
        {"rollout_sequence_mask": "geometric", "rollout_sequence_high": 1.5},  # the second mean is 1.34
        [[1, 1], [1, 1]],
        {"masked_response_fraction": 0.0},
    ),
    (
        {"rollout_sequence_mask": "max", "rollout_sequence_high": 3.0},
        [[0, 0], [1, 1]],
        {"masked_response_fraction": 1 / 2},
    ),
    (
        {"rollout_sequence_mask": "max", "rollout_sequence_low": 0.3, "rollout_sequence_high": 9.0},
        [[0, 0], [1, 1]],
        {"masked_response_fraction": 1 / 2},
    ),
    (
        {"rollout_sequence_mask": "max", "rollout_sequence_low": 0.2},
        [[1, 1], [1, 1]],
        {"masked_response_fraction": 0.0},
    ),
    (
        {"rollout_correction": "token_tis", "rollout_sequence_mask": "max", "rollout_sequence_high": 3.0},
        [[0, 0], [1.8, 1]],
        {"truncated_token_fraction": 1 / 4, "masked_response_fraction": 1 / 2},
    ),
]


def run(options: dict, policy: torch.Tensor):
    out = build_objective(options)(policy, OLD, ADVANTAGES, MASK, rollout_logprobs=OLD - GAP)
    return out, torch.autograd.grad(out.loss, policy)[0]


@pytest.mark.parametrize(
    ("correction", "weights", "touched"), CASES, ids=lambda v: "-".join(v) if isinstance(v, dict) else ""
)
@pytest.mark.parametrize("name", ["sspo", "grpo", "gspo", "gmpo", "cispo", "rloo", "vespo"])
def test_every_token_gradient_is_multiplied_by_its_weight(name, correction, weights, touched):
    policy = (OLD + torch.tensor([[0.1, -0.1], [0.05, 0.1]])).requires_grad_()
    _, plain = run({"name": name}, policy)
    out, corrected = run({"name": name, **correction}, policy)
    torch.testing.assert_close(corrected, plain * torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=1e-15)
    for metric, share in touched.items():
        assert out.metrics[f"rollout_correction/{metric}"].item() == pytest.approx(share)


def test_the_loss_is_multiplied_too():
    """On-policy GRPO: every ratio is 1, so that the loss is the mean of A c."""
    policy = OLD.clone().requires_grad_()
    out, _ = run({"name": "grpo", "rollout_correction": "token_tis"}, policy)
    assert out.loss.item() == pytest.approx(-(1 * (2 + 0.25) / 2 - 2 * (1.8 + 1) / 2) / 2)


@pytest.mark.parametrize("name", ["grpo", "sapo", "dapo"])
def test_a_corrected_token_level_loss_is_its_own_gradients_integral(name):
    policy = (OLD + torch.tensor([[0.1, -0.1], [0.05, 0.1]])).requires_grad_()
    objective = build_objective({"name": name, "rollout_correction": "icepop"})
    assert torch.autograd.gradcheck(
        lambda p: objective(p, OLD, ADVANTAGES, MASK, rollout_logprobs=OLD - GAP).loss, policy
    )


def test_without_an_option_the_gap_is_only_measured():
    policy = OLD.clone().requires_grad_()
    out, gradient = run({"name": "sspo"}, policy)
    plain = build_objective({"name": "sspo"})(policy, OLD, ADVANTAGES, MASK)
    assert torch.equal(out.loss, plain.loss)
    assert torch.equal(gradient, torch.autograd.grad(plain.loss, policy)[0])
    assert out.metrics["rollout_ratio/mean"].item() == pytest.approx((4 + 0.25 + 1.8 + 1) / 4)
    assert out.metrics["rollout_ratio/max"].item() == pytest.approx(4.0)
    assert not any(name.startswith("rollout") for name in plain.metrics)


def test_extreme_gaps_stay_finite():
    policy = OLD.clone().requires_grad_()
    for gap in (60.0, -60.0, 1e4):
        for correction in ("token_tis", "sequence_tis", "icepop"):
            objective = build_objective({"name": "sspo", "rollout_correction": correction})
            out = objective(policy, OLD, ADVANTAGES, MASK, rollout_logprobs=OLD - gap)
            assert torch.autograd.grad(out.loss, policy)[0].isfinite().all()


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [("k1", -LOG2, 1.0), ("k2", LOG2**2 / 2, -LOG2), ("k3", 2 - 1 - LOG2, 1 - 2.0)],
)
def test_divergence_by_hand(estimator, value, slope):
    """The reference gives the token twice the policy's probability: d = log 2."""
    policy = torch.tensor([-2.0], dtype=torch.float64, requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor([-2.0 + LOG2], dtype=torch.float64), estimator)
    assert estimate.item() == pytest.approx(value)
    assert torch.autograd.grad(estimate.sum(), policy)[0].item() == pytest.approx(slope)


def test_k3_stays_finite_for_a_reference_far_away():
    policy = torch.tensor([-100.0], requires_grad=True)
    estimate = kl_estimate(policy, torch.tensor([0.0]), "k3")
    assert estimate.isfinite().all()
    assert torch.autograd.grad(estimate.sum(), policy)[0].isfinite().all()
