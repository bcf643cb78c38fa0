"""The actor against plain PyTorch: log-probabilities token by token, gradients, and independence of the cut."""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import pytest
import torch

from nemo_sspo.config.schema import OptimizerConfig
from nemo_sspo.data.responses import ResponseBatch
from nemo_sspo.model import build_model
from nemo_sspo.training.actor import Actor
from tests.tiny import VOCAB, make_batch, tiny_config, uneven_batch


class Kind(NamedTuple):
    """The precision and the optimizer of an actor."""

    precision: str = "32"
    distributed_optimizer: bool = False


KINDS = [Kind(*k) for k in (("32", False), ("32", True), ("bf16", False), ("bf16", True))]
EVERY_KIND = pytest.mark.parametrize("kind", KINDS, ids=[f"{k.precision}{'_distopt' * k[1]}" for k in KINDS])


def make_actor(
    groups, micro_batch_size: int = 64, *overrides: str, kind: Kind = KINDS[0], lr: float = 1e-2, vocab: int = VOCAB
) -> Actor:
    policy = build_model(tiny_config(*overrides).model, vocab, groups, kind.precision)
    actor = Actor(policy, micro_batch_size, kind.distributed_optimizer)
    actor.set_optimizer(OptimizerConfig(lr=lr), clip_grad=1e9, total_steps=10)
    return actor


def parameters(actor: Actor) -> dict[str, Any]:  # Megatron-Core adds attributes to them
    return dict(actor.policy.chunks[0].named_parameters())


def inner_optimizers(actor: Actor) -> list[torch.optim.Optimizer]:
    """PyTorch's, within Megatron-Core's."""
    return [o.optimizer for o in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])]


def snapshot(actor: Actor) -> dict[str, Any]:
    """All that a step changes."""
    optimizers = inner_optimizers(actor)
    return {
        "weights": {name: p.detach().clone() for name, p in parameters(actor).items()},
        "main weights": [p.detach().clone() for o in optimizers for g in o.param_groups for p in g["params"]],
        "optimizers": [copy.deepcopy(o.state_dict()) for o in optimizers],
        "schedule": actor.scheduler.num_steps,
    }


def mean_nll(batch: ResponseBatch):
    count = batch.num_tokens
    return lambda piece, logprobs, entropy: -(logprobs * piece.mask).sum() / count


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("vocab", [VOCAB, VOCAB - 5], ids=["exact", "padded"])
def test_logprobs_token_by_token_against_the_models_softmax(groups, temperature, vocab):
    actor = make_actor(groups, vocab=vocab)
    prompts, responses = [[7], [5, 6, 9]], [[1, 2, 3], [4]]
    logprobs, entropy = actor.logprobs(make_batch(prompts, responses), 64, temperature)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        with torch.no_grad():
            positions = torch.arange(len(prompt + response))[None]
            logits = actor.policy.chunks[0](torch.tensor([prompt + response]), positions, None)
        assert logits.shape[-1] == VOCAB
        table = (logits[0, :, :vocab].double() / temperature).log_softmax(-1)
        for t, token in enumerate(response):
            position = len(prompt) + t - 1
            assert logprobs[row, t].item() == pytest.approx(table[position, token].item(), rel=1e-6, abs=1e-6)
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
    (plain,) = build_model(tiny_config().model, VOCAB, groups).chunks  # the same seed: the same weights
    total = torch.zeros(())
    for i in range(len(batch)):
        n, m = int(batch.prompt_lengths[i]), int(batch.response_lengths[i])
        tokens = batch.tokens[i : i + 1, : n + m]
        table = plain(tokens, torch.arange(n + m)[None], None)[0].log_softmax(-1)
        total = total - table[n - 1 : n + m - 1].gather(1, tokens[0, n:, None]).sum()
    (total / batch.num_tokens).backward()
    norm = torch.stack([p.grad.norm() for p in plain.parameters() if p.grad is not None]).norm()
    result = actor.step(batch, mean_nll(batch))
    assert result.loss == pytest.approx(float(total.detach() / batch.num_tokens), rel=1e-5)
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for (name, mine), theirs in zip(parameters(actor).items(), plain.parameters(), strict=True):
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
    (model,) = actor.policy.chunks

    def refuse(module, *unused):
        raise AssertionError("the output layer was called")

    handle = model.output_layer.register_forward_pre_hook(refuse)
    actor.logprobs(batch, 4)
    actor.step(batch, mean_nll(batch))
    handle.remove()
    with pytest.raises(AssertionError, match="was called"):  # the check can fail: a plain forward pass does call it
        model.output_layer.register_forward_pre_hook(refuse)
        model(batch.tokens, torch.arange(batch.tokens.shape[1]).expand_as(batch.tokens), None)


class Cliff(torch.autograd.Function):
    """The identity, with a slope of one's choice."""

    @staticmethod
    def forward(ctx, value, slope):
        ctx.slope = slope
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.slope, None


def in_the_first_micro_batch_only(piece, logprobs, entropy):
    return logprobs.sum() * (math.nan if piece.tokens[0, 0] == uneven_batch(4).tokens[0, 0] else 1.0)


BROKEN = {  # a loss, and whether it and the norm of its gradient are finite
    "nan_loss": (lambda piece, logprobs, entropy: logprobs.sum() * math.nan, False, False),
    "nan_loss_of_one_micro_batch": (in_the_first_micro_batch_only, False, False),
    "infinite_loss_of_finite_gradient": (lambda piece, logprobs, entropy: logprobs.sum() + math.inf, False, True),
    "infinite_gradient": (lambda piece, logprobs, entropy: Cliff.apply(logprobs, math.inf).sum(), True, False),
    "nan_gradient": (lambda piece, logprobs, entropy: Cliff.apply(logprobs, math.nan).sum(), True, False),
}


@EVERY_KIND
@pytest.mark.parametrize("broken", BROKEN)
def test_a_step_that_is_not_finite_is_left_out(groups, broken, kind):
    loss_function, finite_loss, finite_norm = BROKEN[broken]
    batch = uneven_batch(4)
    actor, untroubled = (make_actor(groups, 2, kind=kind) for _ in range(2))
    assert actor.step(batch, mean_nll(batch)).finite and untroubled.step(batch, mean_nll(batch)).finite
    before = snapshot(actor)
    assert all(o.state_dict()["state"] for o in inner_optimizers(actor))  # there is a state to lose
    result = actor.step(batch, loss_function)
    assert (math.isfinite(result.loss), math.isfinite(result.grad_norm)) == (finite_loss, finite_norm)
    assert not result.finite
    torch.testing.assert_close(snapshot(actor), before, rtol=0, atol=0)
    after, expected = (a.step(batch, mean_nll(batch)) for a in (actor, untroubled))
    assert after.finite
    for name in ("loss", "grad_norm", "learning_rate"):
        assert getattr(after, name) == getattr(expected, name), name
    torch.testing.assert_close(snapshot(actor), snapshot(untroubled), rtol=0, atol=0)
    assert any(not torch.equal(p, before["weights"][name]) for name, p in parameters(actor).items())


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_bf16_is_close_to_float32(groups, distributed_optimizer):
    batch = uneven_batch(6)
    exact = make_actor(groups, 4).step(batch, mean_nll(batch))
    actor = make_actor(groups, 4, kind=Kind("bf16", distributed_optimizer))
    assert {p.dtype for p in parameters(actor).values()} == {torch.bfloat16}
    result = actor.step(batch, mean_nll(batch))
    assert result.policy_logprobs.dtype == torch.float32
    assert result.loss != exact.loss
    assert result.loss == pytest.approx(exact.loss, rel=1e-2)
    assert result.grad_norm == pytest.approx(exact.grad_norm, rel=5e-2)


@EVERY_KIND
def test_updates_too_small_for_bf16_add_up(groups, kind):
    """Norms begin at 1, where bfloat16 goes down in steps of 1/256: updates of 1/2500 would each be rounded away."""
    lr, steps = 4e-4, 10
    actor = make_actor(groups, kind=kind, lr=lr)
    batch = uneven_batch(6)
    norms = {name: p for name, p in parameters(actor).items() if p.dim() == 1}
    actor.step(batch, mean_nll(batch))
    main = [p for o in inner_optimizers(actor) for g in o.param_groups for p in g["params"]]
    assert {p.dtype for p in main} == {torch.float32}
    assert sum(p.numel() for p in main) == sum(p.numel() for p in parameters(actor).values())
    if kind.precision == "bf16":
        assert all((p == 1).all() for p in norms.values())  # as yet lost in bfloat16
    for _ in range(steps - 1):
        actor.step(batch, mean_nll(batch))
    for name, norm in norms.items():
        moved = (norm.float() - 1).abs().max()
        assert 0.5 * lr * steps < moved < 2**-8 + lr * steps, name


@pytest.mark.parametrize(
    "overrides",
    [
        ("model.activations_checkpoint_granularity=selective",),
        (
            "model.activations_checkpoint_granularity=full",
            "model.activations_checkpoint_method=uniform",
            "model.activations_checkpoint_num_layers=1",
        ),
    ],
    ids=["selective", "full"],
)
def test_activations_computed_again_give_the_same_gradient(groups, overrides):
    batch = uneven_batch(6)

    def outcome(*overrides: str) -> tuple[dict[str, Any], int]:
        actor = make_actor(groups, 3, *overrides)
        calls = []
        layers: Any = actor.policy.chunks[0].decoder.layers
        for layer in layers:
            layer.self_attention.core_attention.register_forward_hook(lambda *_: calls.append(1))
        result = actor.step(batch, mean_nll(batch))
        gradients = {name: p.main_grad.clone() for name, p in parameters(actor).items()}
        return {"loss": result.loss, "logprobs": result.policy_logprobs, "gradients": gradients}, len(calls)

    (kept, once), (again, twice) = outcome(), outcome(*overrides)
    assert (once, twice) == (4, 8)  # two layers, two micro-batches
    assert any(g.abs().max() > 1e-3 for g in kept["gradients"].values())
    torch.testing.assert_close(again, kept, rtol=1e-6, atol=1e-7)


def test_the_learning_rate_warms_up_then_falls_to_its_minimum(groups):
    actor = make_actor(groups)
    options = OptimizerConfig(lr=1.0)
    options.sched.warmup_steps, options.sched.min_lr = 1, 0.1
    actor.set_optimizer(options, clip_grad=1e9, total_steps=3)
    batch = uneven_batch(2)
    rates = [actor.step(batch, lambda piece, logprobs, entropy: 0 * logprobs.sum()).learning_rate for _ in range(5)]
    assert rates == pytest.approx([0.5, 1.0, 0.55, 0.1, 0.1])


@pytest.mark.parametrize("leave", ["as_usual", "by_an_exception"])
@EVERY_KIND
def test_the_reference_takes_the_policys_place_and_goes(groups, kind, leave):
    actor, batch = make_actor(groups, kind=kind), uneven_batch(6)
    assert not actor.has_reference
    with pytest.raises(RuntimeError, match="keep_reference"), actor.reference():
        pass
    reference, _ = actor.logprobs(batch, 4)
    actor.keep_reference()
    assert actor.has_reference
    for _ in range(2):
        actor.step(batch, mean_nll(batch))
    policy, _ = actor.logprobs(batch, 4)
    assert (policy - reference).abs().max() > 1e-3
    before = snapshot(actor)
    for _ in range(2):  # the reference stays what it was
        try:
            with actor.reference():
                assert torch.equal(actor.logprobs(batch, 4)[0], reference)
                if leave == "by_an_exception":
                    raise KeyError("something")
        except KeyError:
            assert leave == "by_an_exception"
        assert torch.equal(actor.logprobs(batch, 4)[0], policy)
        torch.testing.assert_close(snapshot(actor), before, rtol=0, atol=0)


@EVERY_KIND
def test_moving_the_optimizers_state_keeps_its_values(groups, kind):
    actor, batch = make_actor(groups, kind=kind), uneven_batch(6)
    with actor.optimizer_state_in_host_memory():  # before the first step there is none
        pass
    actor.step(batch, mean_nll(batch))
    before = snapshot(actor)
    assert sum(name.startswith("exp_avg") for o in before["optimizers"] for s in o["state"].values() for name in s) > 1
    tensors = [id(v) for o in inner_optimizers(actor) for state in o.state.values() for v in state.values()]
    with actor.optimizer_state_in_host_memory():
        assert tensors == [id(v) for o in inner_optimizers(actor) for state in o.state.values() for v in state.values()]
        torch.testing.assert_close(snapshot(actor), before, rtol=0, atol=0)
    actor._move_optimizer_state(torch.device("cpu"))
    torch.testing.assert_close(snapshot(actor), before, rtol=0, atol=0)
    assert actor.step(batch, mean_nll(batch)).finite
