"""What goes in: shapes, masks, junk off the mask, non-finite values, extreme ratios, empty micro-batches."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_sspo.objective import OBJECTIVES, build_objective

EACH = pytest.mark.parametrize("name", sorted(OBJECTIVES))


def batch(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(3, 4, generator=generator, dtype=torch.float64)
    policy = old + 0.1 * torch.randn(3, 4, generator=generator, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 0]], dtype=torch.bool)
    return policy.to(dtype).requires_grad_(), old.to(dtype), torch.tensor([1.0, -0.5, 0.25], dtype=dtype), mask


def run(objective, policy, *rest, **arguments):
    out = objective(policy, *rest, **arguments)
    return out.loss.detach(), torch.autograd.grad(out.loss, policy)[0]


@EACH
@pytest.mark.parametrize("check_finite", [True, False])
@pytest.mark.parametrize("junk", [math.nan, math.inf, -math.inf, 1e30])
def test_values_off_the_mask_never_leak(name, junk, check_finite):
    policy, old, advantages, mask = batch()
    objective = build_objective({"name": name, "check_finite": check_finite})
    loss, gradient = run(objective, policy, old, advantages, mask)
    dirty_policy = torch.where(mask, policy, junk).detach().requires_grad_()
    dirty_loss, dirty_gradient = run(objective, dirty_policy, torch.where(mask, old, -junk), advantages, mask)
    assert torch.equal(dirty_loss, loss)
    assert torch.equal(dirty_gradient, gradient)
    assert (gradient[~mask] == 0).all()
    assert all(v.isfinite() for v in objective(dirty_policy, old, advantages, mask).metrics.values())


@EACH
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32, torch.bfloat16])
def test_masks_of_any_dtype(name, dtype):
    policy, old, advantages, mask = batch()
    objective = build_objective({"name": name})
    assert torch.equal(
        objective(policy, old, advantages, mask.to(dtype)).loss, objective(policy, old, advantages, mask).loss
    )


@EACH
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (2, 0), (2, 3)], ids=str)
def test_an_empty_micro_batch_gives_a_differentiable_zero(name, shape):
    policy = torch.randn(shape, requires_grad=True)
    advantages = torch.ones(shape[0])
    for counts in ({}, {"num_responses": 8, "num_tokens": 100}):
        out = build_objective({"name": name})(policy, policy.detach(), advantages, torch.zeros(shape), **counts)
        (gradient,) = torch.autograd.grad(out.loss, policy)
        assert out.loss.item() == 0.0
        assert (gradient == 0).all()
        assert all(value.isfinite() for value in out.metrics.values())


@EACH
def test_an_empty_packed_micro_batch(name):
    policy = torch.zeros(0, requires_grad=True)
    out = build_objective({"name": name})(
        policy, policy.detach(), torch.zeros(0), torch.zeros(0), cu_seqlens=torch.zeros(1, dtype=torch.int32)
    )
    out.loss.backward()
    assert out.loss.item() == 0.0


@EACH
def test_a_row_without_tokens_counts_in_the_denominator_only(name):
    policy, old, advantages, mask = batch()
    objective = build_objective({"name": name})
    mask[2] = False
    loss, gradient = run(objective, policy, old, advantages, mask)
    alone, _ = run(objective, policy[:2].detach().requires_grad_(), old[:2], advantages[:2], mask[:2])
    by_tokens = objective.mean == "token_mean"
    torch.testing.assert_close(loss, alone if by_tokens else alone * 2 / 3)
    assert (gradient[2] == 0).all()


@EACH
def test_the_advantage_of_a_row_without_tokens_never_leaks(name):
    policy, old, advantages, mask = batch()
    mask[2], advantages[2] = False, math.nan
    loss, gradient = run(build_objective({"name": name, "check_finite": False}), policy, old, advantages, mask)
    assert loss.isfinite()
    assert gradient.isfinite().all()


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("x", [50.0, -50.0, 1e3, -1e3])
def test_extreme_ratios_give_finite_loss_and_gradient(name, x, dtype):
    policy, old, advantages, mask = batch(dtype)
    for sign in (1, -1):
        extreme = torch.where(torch.arange(4) == 1, old + x, policy).detach().requires_grad_()
        out = build_objective({"name": name})(extreme, old, sign * advantages, mask)
        (gradient,) = torch.autograd.grad(out.loss, extreme)
        assert out.loss.isfinite()
        assert gradient.isfinite().all()
        assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize(
    "argument", ["policy_logprobs", "old_logprobs", "reference_logprobs", "rollout_logprobs", "entropy"]
)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_non_finite_values_raise_with_count_and_place(argument, value):
    policy, old, advantages, mask = batch()
    tensors = {
        "policy_logprobs": policy.detach(),
        "old_logprobs": old,
        "reference_logprobs": old.clone(),
        "rollout_logprobs": old.clone(),
        "entropy": old.abs(),
    }
    tensors[argument] = tensors[argument].clone()
    tensors[argument][1, 0] = value  # off the mask: does not count
    tensors[argument][1, 2] = tensors[argument][2, 2] = value
    objective = build_objective({"name": "sspo"})
    with pytest.raises(ValueError, match=rf"^{argument}: 2 non-finite values .* \(row, token\) \(1, 2\): {value}"):
        objective(**tensors, advantages=advantages, mask=mask)
    with pytest.raises(ValueError, match=rf"^{argument}: 2 non-finite values .* \(row, token\) \(1, 2\): {value}"):
        packed = {name: tensor.flatten() for name, tensor in tensors.items()}
        objective(**packed, advantages=advantages, mask=mask.flatten(), cu_seqlens=torch.tensor([0, 4, 8, 12]))
    build_objective({"name": "sspo", "check_finite": False})(**tensors, advantages=advantages, mask=mask)


def test_non_finite_advantages_raise():
    policy, old, advantages, mask = batch()
    advantages[1] = math.nan
    with pytest.raises(ValueError, match="advantages: 1 non-finite values, the first at row 1: nan"):
        build_objective({"name": "grpo"})(policy, old, advantages, mask)


def test_a_mask_of_weights_raises():
    policy, old, advantages, mask = batch()
    weights = mask.double()
    weights[0, 1] = 0.5
    with pytest.raises(ValueError, match=r"mask: 1 values other than 0 and 1, .* \(0, 1\): 0\.5"):
        build_objective({"name": "grpo"})(policy, old, advantages, weights)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"old_logprobs": torch.zeros(3, 5)}, ["old_logprobs", "(3, 5)", "policy_logprobs", "(3, 4)"]),
        ({"mask": torch.ones(3, 3)}, ["mask", "(3, 3)", "(3, 4)"]),
        ({"mask": torch.ones(4)}, ["mask", "(4,)", "(3, 4)"]),
        ({"advantages": torch.zeros(2)}, ["advantages", "(2,)", "(3, 4)", "(3,)"]),
        ({"advantages": torch.zeros(3, 1)}, ["advantages", "(3, 1)", "(3,)"]),
        ({"entropy": torch.zeros(3, 1)}, ["entropy", "(3, 1)", "(3, 4)"]),
        ({"policy_logprobs": torch.zeros(12)}, ["policy_logprobs", "(12,)", "[B, T]"]),
        ({"cu_seqlens": torch.tensor([0, 4, 8, 12])}, ["policy_logprobs", "(3, 4)", "[N]"]),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_shapes_that_do_not_match_raise_with_both(change, words):
    policy, old, advantages, mask = batch()
    arguments = {"policy_logprobs": policy, "old_logprobs": old, "advantages": advantages, "mask": mask} | change
    for check_finite in (True, False):
        with pytest.raises(ValueError) as error:
            build_objective({"name": "sspo", "check_finite": check_finite})(**arguments)
        for word in words:
            assert word in str(error.value)


@pytest.mark.parametrize(
    ("cu_seqlens", "advantages", "words"),
    [
        ([0, 4, 8, 12], 2, "advantages has shape"),
        ([1, 4, 8, 12], 3, "must start at 0"),
        ([0, 8, 4, 12], 3, "never fall"),
        ([0, 4, 8, 13], 3, "at or before the last token"),
        ([0, 4, 8, 11], 3, "no token under the mask behind its end"),
        ([0.0, 4.0, 8.0, 12.0], 3, "must be integers"),
    ],
)
def test_bad_cu_seqlens(cu_seqlens, advantages, words):
    flat = torch.zeros(12)
    with pytest.raises(ValueError, match=words):
        build_objective({"name": "sspo"})(
            flat, flat, torch.ones(advantages), torch.ones(12), cu_seqlens=torch.tensor(cu_seqlens)
        )


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"kl_coeff": 0.1}, "reference_logprobs"),
        ({"entropy_coeff": 0.1}, "entropy"),
        ({"rollout_correction": "icepop"}, "rollout_logprobs"),
        ({"rollout_sequence_mask": "geometric", "rollout_sequence_high": 1.1}, "rollout_logprobs"),
    ],
)
def test_an_option_without_its_argument_raises(options, argument):
    with pytest.raises(ValueError, match=f"{argument} is missing: model.grpo.objective"):
        build_objective({"name": "sspo", **options})(*batch())


@pytest.mark.parametrize("count", [0, -1])
def test_denominators_must_be_counts(count):
    with pytest.raises(ValueError, match=f"num_responses: {count} given"):
        build_objective({"name": "sspo"})(*batch(), num_responses=count)
    with pytest.raises(ValueError, match=f"num_tokens: {count} given"):
        build_objective({"name": "dapo"})(*batch(), num_tokens=count)


@EACH
def test_denominators_may_be_numbers_or_tensors(name):
    objective = build_objective({"name": name})
    number = objective(*batch(), num_responses=7, num_tokens=50).loss
    tensor = objective(*batch(), num_responses=torch.tensor(7), num_tokens=torch.tensor(50.0)).loss
    own = objective(*batch()).loss
    assert torch.equal(number, tensor)
    torch.testing.assert_close(number, own * (8 / 50 if objective.mean == "token_mean" else 3 / 7))
