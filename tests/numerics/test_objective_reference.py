"""Every objective against the loop reference, by value: loss and gradient to 1e-10 in float64."""

from __future__ import annotations

import pytest
import torch

from nemo_sspo.objective import build_objective
from tests.numerics.batches import ALL, EVERY_CASE, case_id, default_options, loss_and_gradient, random_batch
from tests.numerics.loop_reference import loop_loss

TIGHT = {"rtol": 1e-10, "atol": 1e-12}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("options", EVERY_CASE, ids=case_id)
def test_loss_and_gradient(options, seed):
    batch = random_batch(seed=seed)
    loss, gradient = loss_and_gradient(build_objective(options), batch)
    expected = loop_loss(default_options(options), *batch.arguments)
    (expected_gradient,) = torch.autograd.grad(expected, batch.policy)
    torch.testing.assert_close(loss, expected.detach(), **TIGHT)
    torch.testing.assert_close(gradient, expected_gradient, **TIGHT)
    assert gradient.abs().max() > 1e-4


@pytest.mark.parametrize("options", EVERY_CASE, ids=case_id)
def test_float32_is_close_to_float64(options):
    objective = build_objective(options)
    exact, exact_gradient = loss_and_gradient(objective, random_batch(seed=3))
    loss, gradient = loss_and_gradient(objective, random_batch(seed=3, dtype=torch.float32))
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(gradient.double(), exact_gradient, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ALL)
def test_half_precision_is_computed_in_float32(name, dtype):
    batch = random_batch(dtype=dtype)
    loss, gradient = loss_and_gradient(build_objective({"name": name}), batch)
    assert (loss.dtype, gradient.dtype) == (torch.float32, dtype)
    raised = random_batch(dtype=dtype)
    raised.policy, raised.old = raised.policy.detach().float().requires_grad_(), raised.old.float()
    expected, _ = loss_and_gradient(build_objective({"name": name}), raised)
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", sorted(set(ALL) - {"cispo", "vespo", "gspo_token"}))
def test_gradcheck(name):
    """The gradient is that of the loss, by finite differences. Left out: those that stop a gradient on purpose."""
    objective = build_objective({"name": name})
    batch = random_batch(rows=4, width=3, seed=5)
    assert torch.autograd.gradcheck(
        lambda policy: objective(policy, batch.old, batch.advantages, batch.mask).loss,
        batch.policy,
        eps=1e-7,
        atol=1e-6,
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("name", ["sspo", "dapo", "dr_grpo"])
def test_divergence_and_entropy(name, estimator):
    batch, other = random_batch(seed=1), random_batch(seed=2)
    options = {"name": name, "kl_coeff": 0.3, "kl_estimator": estimator, "entropy_coeff": 0.05}
    if name == "dr_grpo":
        options["length_scale"] = 5.0
    entropy = other.policy.detach().abs().requires_grad_()
    extras = {"reference_logprobs": other.old, "entropy": entropy}
    out = build_objective(options)(*batch.arguments, **extras)
    expected = loop_loss(default_options(options), *batch.arguments, other.old, entropy)
    torch.testing.assert_close(out.loss, expected, **TIGHT)
    for got, want in zip(
        torch.autograd.grad(out.loss, (batch.policy, entropy)),
        torch.autograd.grad(expected, (batch.policy, entropy)),
        strict=True,
    ):
        torch.testing.assert_close(got, want, **TIGHT)

    plain = build_objective({"name": name})
    measured = plain(*batch.arguments, **extras)
    torch.testing.assert_close(measured.loss, plain(*batch.arguments).loss)
    torch.testing.assert_close(measured.metrics["entropy/mean"], entropy.detach()[batch.mask].mean())


def test_bf16_old_logprobs_do_not_lower_a_float64_policy():
    batch = random_batch()
    batch.old = batch.old.bfloat16()
    assert build_objective({"name": "sspo"})(*batch.arguments).loss.dtype == torch.float64
