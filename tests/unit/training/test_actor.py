"""The actor against plain PyTorch: log-probabilities token by token, gradients, and independence of the cut."""

from __future__ import annotations

import pytest
import torch

from nemo_sspo.config.schema import OptimizerConfig
from nemo_sspo.data.responses import ResponseBatch
from nemo_sspo.model import build_model
from nemo_sspo.training.actor import Actor
from tests.tiny import VOCAB, make_batch, tiny_config, uneven_batch


def make_actor(groups, micro_batch_size: int = 64) -> Actor:
    actor = Actor(build_model(tiny_config().model, VOCAB, groups), groups, micro_batch_size)
    actor.set_optimizer(OptimizerConfig(lr=1e-2), clip_grad=1e9, total_steps=10)
    return actor


def mean_nll(batch: ResponseBatch):
    count = batch.num_tokens
    return lambda piece, logprobs, entropy: -(logprobs * piece.mask).sum() / count


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_logprobs_token_by_token_against_the_models_softmax(groups, temperature):
    actor = make_actor(groups)
    prompts, responses = [[7], [5, 6, 9]], [[1, 2, 3], [4]]
    logprobs, entropy = actor.logprobs(make_batch(prompts, responses), 64, temperature)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        with torch.no_grad():
            logits = actor.module(torch.tensor([prompt + response]), torch.arange(len(prompt + response))[None], None)
        table = (logits[0].double() / temperature).log_softmax(-1)
        for t, token in enumerate(response):
            position = len(prompt) + t - 1
            assert logprobs[row, t].item() == pytest.approx(table[position, token].item(), abs=1e-6)
            expected = -(table[position].exp() * table[position]).sum().item()
            assert entropy[row, t].item() == pytest.approx(expected, abs=1e-6)
    assert logprobs[1, 1:].tolist() == [0, 0]  # padding


def test_old_logprobs_equal_current_ones_at_unchanged_weights(groups):
    actor = make_actor(groups, micro_batch_size=2)
    batch = uneven_batch(6)
    old, _ = actor.logprobs(batch, micro_batch_size=4)
    result = actor.step(batch, mean_nll(batch))
    assert (result.policy_logprobs - old).abs().max() <= 1e-6
    moved, _ = actor.logprobs(batch, micro_batch_size=4)
    assert (moved - old).abs().max() > 1e-3  # the step did change the weights, so the line above says something


def test_the_gradient_is_autograds(groups):
    actor = make_actor(groups, micro_batch_size=4)
    batch = uneven_batch(6)
    plain = build_model(tiny_config().model, VOCAB, groups)  # the same seed: the same weights
    total = torch.zeros(())
    for i in range(len(batch)):
        n, m = int(batch.prompt_lengths[i]), int(batch.response_lengths[i])
        tokens = batch.tokens[i : i + 1, : n + m]
        table = plain(tokens, torch.arange(n + m)[None], None)[0].log_softmax(-1)
        total = total - table[n - 1 : n + m - 1].gather(1, tokens[0, n:, None]).sum()
    (total / batch.num_tokens).backward()
    norm = torch.sqrt(sum(p.grad.pow(2).sum() for p in plain.parameters() if p.grad is not None))
    result = actor.step(batch, mean_nll(batch))
    assert result.loss == pytest.approx(float(total.detach() / batch.num_tokens), rel=1e-5)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for (name, mine), theirs in zip(actor.module.named_parameters(), plain.parameters(), strict=True):
        expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
        torch.testing.assert_close(mine.main_grad, expected, atol=1e-6, rtol=1e-4, msg=name)


@pytest.mark.parametrize("micro_batch_size", [1, 2, 4])
def test_loss_and_gradient_do_not_depend_on_the_micro_batches(groups, micro_batch_size):
    batch = uneven_batch(6)
    whole = make_actor(groups, 64).step(batch, mean_nll(batch))
    cut = make_actor(groups, micro_batch_size).step(batch, mean_nll(batch))
    assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
    assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
    torch.testing.assert_close(cut.policy_logprobs, whole.policy_logprobs, atol=1e-6, rtol=0)


def test_full_logits_never_exist(groups):
    actor = make_actor(groups)
    batch = uneven_batch(4)

    def refuse(module, *unused):
        raise AssertionError("the output layer was called")

    handle = actor.module.output_layer.register_forward_pre_hook(refuse)
    actor.logprobs(batch, 4)
    actor.step(batch, mean_nll(batch))
    handle.remove()
    with pytest.raises(AssertionError, match="was called"):  # the check can fail: a plain forward pass does call it
        actor.module.output_layer.register_forward_pre_hook(refuse)
        actor.module(batch.tokens, torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens), None)


def test_a_loss_that_is_not_finite_leaves_the_weights_alone(groups):
    actor = make_actor(groups)
    batch = uneven_batch(4)
    before = [p.detach().clone() for p in actor.module.parameters()]
    with pytest.raises(FloatingPointError, match="the loss of this step is nan"):
        actor.step(batch, lambda piece, logprobs, entropy: logprobs.sum() * float("nan"))
    assert all(torch.equal(a, b) for a, b in zip(before, actor.module.parameters(), strict=True))


@pytest.mark.parametrize("slope", [float("inf"), float("nan")])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(groups, slope):
    class Cliff(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * slope

    actor = make_actor(groups)
    before = [p.detach().clone() for p in actor.module.parameters()]
    with pytest.raises(FloatingPointError, match="gradient's norm"):
        actor.step(uneven_batch(4), lambda piece, logprobs, entropy: Cliff.apply(logprobs).sum())
    assert all(torch.equal(a, b) for a, b in zip(before, actor.module.parameters(), strict=True))


def test_the_learning_rate_warms_up_then_falls_to_its_minimum(groups):
    actor = make_actor(groups)
    options = OptimizerConfig(lr=1.0)
    options.sched.warmup_steps, options.sched.min_lr = 1, 0.1
    actor.set_optimizer(options, clip_grad=1e9, total_steps=3)
    batch = uneven_batch(2)
    rates = [actor.step(batch, lambda piece, logprobs, entropy: 0 * logprobs.sum()).learning_rate for _ in range(5)]
    assert rates == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1])
