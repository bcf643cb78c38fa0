"""Large batches in row chunks: the same loss, gradient and metrics, in less memory."""

from __future__ import annotations

import pytest
import torch

from nemo_sspo.objective import build_objective, chunks
from tests.allocations import peak_bytes
from tests.numerics.batches import EVERY_CASE, case_id, random_batch

EXTRAS = {"kl_coeff": 0.1, "entropy_coeff": 0.01, "rollout_correction": "token_tis"}


def evaluate(options: dict, extras: bool = False):
    """Loss, gradients and metrics of one batch of 6 rows of 7 tokens."""
    batch = random_batch()
    objective = build_objective(options | (EXTRAS if extras else {}))
    given = {}
    if extras:
        entropy = batch.policy.detach().square().requires_grad_()
        given = {"entropy": entropy, "reference_logprobs": batch.old + 0.1, "rollout_logprobs": batch.old - 0.2}
    out = objective(*batch.arguments, **given)
    out.loss.backward()
    return out, [batch.policy.grad, *([given["entropy"].grad] if extras else [])]


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "extras"])
@pytest.mark.parametrize("tokens", [7, 14, 30])  # chunks of one row, two rows, four and two
@pytest.mark.parametrize("options", EVERY_CASE, ids=[case_id(c) for c in EVERY_CASE])
def test_chunks_equal_the_whole(monkeypatch, options, tokens, extras):
    whole, whole_gradients = evaluate(options, extras)
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", tokens)
    out, gradients = evaluate(options, extras)
    torch.testing.assert_close(out.loss, whole.loss, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(gradients, whole_gradients, rtol=1e-12, atol=1e-14)
    assert out.metrics.keys() == whole.metrics.keys()
    for name, value in whole.metrics.items():
        torch.testing.assert_close(out.metrics[name], value, rtol=1e-9, atol=1e-12, msg=name)


def test_the_output_gradient_scales(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 7)
    batch = random_batch()
    (once,) = torch.autograd.grad(build_objective({"name": "sspo"})(*batch.arguments).loss, batch.policy)
    (thrice,) = torch.autograd.grad(3 * build_objective({"name": "sspo"})(*batch.arguments).loss, batch.policy)
    torch.testing.assert_close(thrice, 3 * once)


def test_without_gradient(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 7)
    batch = random_batch()
    out = build_objective({"name": "sspo"})(batch.policy.detach(), *batch.arguments[1:])
    assert not out.loss.requires_grad
    with torch.no_grad():
        assert build_objective({"name": "sspo"})(*batch.arguments).loss == out.loss


def test_an_entropy_that_is_only_measured_gets_no_gradient(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 7)
    batch = random_batch()
    entropy = torch.ones_like(batch.policy).requires_grad_()
    out = build_objective({"name": "sspo"})(batch.policy.detach(), *batch.arguments[1:], entropy=entropy)
    assert out.metrics["entropy/mean"] == 1
    out.loss.backward()
    assert entropy.grad is None or not entropy.grad.any()


def test_packed_rows_without_their_bounds_are_refused_at_any_size(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 7)
    with pytest.raises(ValueError, match=r"it must be \[B, T\]"):
        build_objective({"name": "sspo"})(torch.zeros(99), torch.zeros(99), torch.zeros(3), torch.ones(99))


def test_a_second_backward_pass_is_refused(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 7)
    loss = build_objective({"name": "sspo"})(*random_batch().arguments).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="used up"):
        loss.backward()


def test_a_bad_value_is_found_by_its_row_in_the_whole_batch(monkeypatch):
    monkeypatch.setattr(chunks, "CHUNK_TOKENS", 7)
    batch = random_batch()
    batch.old[4, 0] = float("nan")
    with pytest.raises(ValueError, match=r"old_logprobs: 1 non-finite values under the mask, .* \(4, 0\)"):
        build_objective({"name": "sspo"})(*batch.arguments)
    with pytest.raises(ValueError, match="advantages must be"):
        build_objective({"name": "sspo"})(batch.policy, batch.old, batch.advantages[:2], batch.mask)


@pytest.mark.parametrize("name", ["sspo", "grpo"])
def test_peak_memory_is_at_most_eight_bytes_a_token(name):
    shape = (512, 4096)
    old = torch.full(shape, -1.0)
    policy = (old + 0.1).requires_grad_()
    mask = torch.arange(shape[1]) < torch.linspace(1, 4096, shape[0])[:, None]
    objective = build_objective({"name": name})
    peak = peak_bytes(lambda: objective(policy, old, torch.linspace(-1, 1, shape[0]), mask).loss.backward())
    assert peak <= 8 * policy.numel()  # its gradient, and the intermediates of one chunk
