"""All routers of a live model: layers by their global numbers, reports, refusals; and a rollout's checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_sspo.compat import megatron_routing
from nemo_sspo.config.schema import OptimizerConfig, TokenizerConfig
from nemo_sspo.data import build_tokenizer
from nemo_sspo.data.dataset import EncodedProblem
from nemo_sspo.errors import RunError, UserError
from nemo_sspo.generation import GenerationOutput, SamplingParams
from nemo_sspo.generation.native import NativeEngine
from nemo_sspo.model import build_model
from nemo_sspo.routing import RoutingReplay
from nemo_sspo.routing.hook import Action
from nemo_sspo.training.actor import Actor
from nemo_sspo.training.rollout import Rollout, collect_rollout, routing_metrics, sampling_params
from tests.tiny import VOCAB, tiny_config, uneven_batch

TOKENIZER = build_tokenizer(TokenizerConfig())
PROBLEMS = [EncodedProblem(TOKENIZER.encode(text), "5", text) for text in ("2+3", "11+12")]
EXPERTS, K, MEMBERS = 4, 2, 3


def make_actor(groups, *overrides: str, vocab: int = VOCAB) -> Actor:
    policy = build_model(tiny_config(*overrides).model, vocab, groups)
    actor = Actor(policy, 4, routing=RoutingReplay(policy.chunks, policy.config, groups))
    actor.set_optimizer(OptimizerConfig(lr=1e-2), clip_grad=1e9, total_steps=10)
    return actor


def mean_nll(batch: Any) -> Callable:
    return lambda piece, logprobs, entropy: -(logprobs * piece.mask).sum() / batch.num_tokens


def random_routes(lengths: Sequence[int], layers: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.rand(n, layers, EXPERTS, generator=generator).argsort(-1)[..., :K].to(torch.uint8) for n in lengths]


class Dense(torch.nn.Module):
    """A layer without experts."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return 0.1 * hidden, None


def test_dense_layers_do_not_shift_the_others(groups):
    policy = build_model(tiny_config("model.num_layers=5").model, VOCAB, groups)
    for layer in policy.chunks[0].decoder.layers:
        if layer.layer_number in (1, 4):
            layer.mlp = Dense()
    policy.config.moe_layer_freq = [0, 1, 1, 0, 1]
    actor = Actor(policy, 4, routing=RoutingReplay(policy.chunks, policy.config, groups))
    assert actor.routing is not None
    assert actor.routing.form.layers == (2, 3, 5)
    batch = uneven_batch()
    _, _, routes = actor.record_routes(batch, 4)
    seen: dict[int, Tensor] = {}
    for number, router in megatron_routing.routers(policy.chunks[0]):
        router.register_forward_hook(lambda m, i, out, number=number: seen.__setitem__(number, out[1]))
    given = random_routes([len(r) for r in routes], layers=3)
    actor.logprobs(replace(batch.select(slice(0, 1)), routes=given[:1]), 4)
    for place, number in enumerate((2, 3, 5)):
        taken = [set(row.nonzero().flatten().tolist()) for row in seen[number]]
        assert taken == [set(ids.tolist()) for ids in given[0][:, place]]


def test_a_second_model_has_its_own_routes(groups):
    """Made before, after and in between: nothing is handed out by order of creation."""
    first, batch = make_actor(groups), uneven_batch()
    _, _, recorded = first.record_routes(batch, 4)
    second = make_actor(groups, "model.seed=7")
    _, _, others = second.record_routes(batch, 4)
    again = first.record_routes(batch, 4)[2]
    assert all(torch.equal(a, b) for a, b in zip(recorded, again, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(recorded, others, strict=True))
    with first.routing.taking_part(Action.RECORD):  # type: ignore[union-attr]
        second.logprobs(batch, 4)
        assert not any(hook.calls for hook in first.routing.hooks())  # type: ignore[union-attr]


def test_a_batch_with_routes_needs_an_actor_with_hooks(policy):
    batch = uneven_batch()
    with pytest.raises(RuntimeError, match="built without routing replay"):
        Actor(policy, 4).logprobs(replace(batch, routes=random_routes([2] * len(batch))), 4)


def test_a_router_that_was_replaced_is_named(groups):
    actor, batch = make_actor(groups), uneven_batch()
    _, _, routes = actor.record_routes(batch, 4)
    actor.policy.chunks[0].decoder.layers[1].mlp.router.router_replay = None
    with pytest.raises(RunError, match=r"routers of layers 2 did not replay in every forward pass"):
        actor.step(replace(batch, routes=routes), mean_nll(batch))


def test_a_layer_that_a_forward_pass_went_around_is_named(groups):
    actor, batch = make_actor(groups), uneven_batch()
    _, _, routes = actor.record_routes(batch, 4)
    actor.policy.chunks[0].decoder.layers[0].mlp.forward = Dense().forward
    with pytest.raises(RunError, match=r"routers of layers 1 did not replay"):
        actor.step(replace(batch, routes=routes), mean_nll(batch))
    with pytest.raises(RunError, match=r"routers of layers 1 did not record"):
        actor.record_routes(batch, 4)


def test_a_model_without_experts_is_refused(policy):
    config = policy.config
    config.num_moe_experts = None
    with pytest.raises(UserError, match=r"model\.grpo\.routing_replay\.mode: got a model without experts"):
        RoutingReplay(policy.chunks, config, policy.groups)


def test_after_a_pass_the_router_chooses_by_itself(groups):
    actor, batch = make_actor(groups), uneven_batch()
    before, _ = actor.logprobs(batch, 4)
    replayed, _ = actor.logprobs(replace(batch, routes=random_routes([3] * 2 + [1] * 4)), 4)
    after, _ = actor.logprobs(batch, 4)
    assert torch.equal(before, after)
    assert (before - replayed).abs().max() > 1e-3


# -- rollouts -------------------------------------------------------------------------------------------------------


class Wrapped(NativeEngine):
    """An engine whose routes go through a function of the test's."""

    def __init__(self, actor: Actor, change: Callable[[GenerationOutput], Tensor | None]) -> None:
        super().__init__(actor.policy, 64, 8, actor.routing)
        self.change = change

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationOutput]:
        return [replace(o, routes=self.change(o)) for o in super().generate(prompts, sampling, seeds)]


def roll_out(
    groups, mode: str, change: Callable = lambda o: o.routes, reference: bool = False
) -> tuple[Actor, Rollout]:
    actor = make_actor(groups, vocab=TOKENIZER.vocab_size)
    if reference:
        actor.keep_reference()
    rollout = collect_rollout(
        actor,
        Wrapped(actor, change),
        PROBLEMS,
        TOKENIZER,
        sampling_params(TOKENIZER, 10, 1.0),
        samples_per_prompt=MEMBERS,
        advantages="grpo",
        forward_micro_batch_size=4,
        seed=0,
        step=0,
        groups=groups,
        routing_replay=mode,
    )
    return actor, rollout


@pytest.mark.parametrize(("mode", "missing"), [("R2", 0), ("R3", 1)])
def test_a_rollout_has_the_routes_of_its_tokens(groups, mode, missing):
    actor, rollout = roll_out(groups, mode)
    assert rollout.routes is not None
    lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
    assert [len(routes) for routes in rollout.routes] == [n - missing for n in lengths]
    metrics = routing_metrics(rollout, actor.routing.form)  # type: ignore[union-attr]
    assert metrics["routing/bytes_per_token"] == 2 * K
    assert metrics["routing/live_tokens"] == missing * len(rollout)
    assert 1 < metrics["routing/load_imbalance"] <= EXPERTS / K
    result = actor.step(rollout, mean_nll(rollout))
    assert result.routing is not None
    assert result.routing.replayed_fraction == 1.0
    assert result.routing.mismatch_rate == 0.0  # the weights are those that chose
    torch.testing.assert_close(result.policy_logprobs, rollout.old_logprobs, rtol=0, atol=2e-6)
    later = actor.step(rollout, mean_nll(rollout)).routing
    assert later is not None
    assert later.mismatch_rate > 0


def test_the_engines_routes_are_those_of_a_training_pass(groups):
    """Same weights, same tokens: in float32 the two engines choose alike."""
    _, by_trainer = roll_out(groups, "R2")
    _, by_engine = roll_out(groups, "R3")
    assert by_trainer.responses == by_engine.responses
    assert by_trainer.routes is not None
    assert by_engine.routes is not None
    for mine, theirs in zip(by_trainer.routes, by_engine.routes, strict=True):
        assert torch.equal(mine[:-1].sort(-1).values, theirs.sort(-1).values)


def test_routes_stay_with_their_responses(groups):
    """Through shuffling and cutting."""
    _, rollout = roll_out(groups, "R2")
    assert rollout.routes is not None
    order = torch.tensor([4, 1, 5, 0])
    for piece, rows in zip(rollout.select(order).split(3), ([4, 1, 5], [0]), strict=True):
        assert piece.routes is not None
        assert [id(routes) for routes in piece.routes] == [id(rollout.routes[row]) for row in rows]


def test_the_reference_routes_by_itself(groups):
    """Its log-probabilities are those without replay, the old ones those with the experts that the engine tells of."""

    def others(output: GenerationOutput) -> Tensor:
        assert output.routes is not None
        return random_routes([len(output.routes)])[0]

    actor, rollout = roll_out(groups, "R3", others, reference=True)
    native, _ = actor.logprobs(replace(rollout, routes=None), 4)
    replayed, _ = actor.logprobs(rollout, 4)
    torch.testing.assert_close(rollout.reference_logprobs, native, rtol=0, atol=2e-6)
    torch.testing.assert_close(rollout.old_logprobs, replayed, rtol=0, atol=2e-6)
    assert (native - replayed).abs().max() > 1e-2


def test_tokens_without_a_route_are_counted_and_use_the_live_router(groups):
    """The engine tells nothing of two tokens in the middle (their prefix was cached) and drops three at the end."""

    def drop(output: GenerationOutput) -> Tensor:
        assert output.routes is not None
        routes = output.routes.long()[:-3]
        routes[1:3] = -1
        return routes

    actor, rollout = roll_out(groups, "R3", drop)
    lengths = (rollout.prompt_lengths + rollout.response_lengths).tolist()
    kept = [max(n - 4, 0) - min(max(n - 5, 0), 2) for n in lengths]
    metrics = routing_metrics(rollout, actor.routing.form)  # type: ignore[union-attr]
    assert metrics["routing/live_tokens"] == sum(lengths) - sum(kept)
    result = actor.step(rollout, mean_nll(rollout))
    assert result.routing is not None
    assert result.routing.replayed_fraction == pytest.approx(sum(kept) / (sum(lengths) - len(lengths)))
    assert 0.2 < result.routing.replayed_fraction < 0.8
    torch.testing.assert_close(result.policy_logprobs, rollout.old_logprobs, rtol=0, atol=2e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda output: None, r"Wrapped gave no routes for response 0 of 6, although it was asked for them"),
        (
            lambda output: torch.cat([output.routes] * 3),
            r"Wrapped gave \d+ rows of routes for the \d+ tokens",
        ),
        (lambda output: output.routes * 0, r"routes of Wrapped, response 0: .*layer 1 with experts \[0, 0\]"),
        (lambda output: output.routes + 3, r"routes of Wrapped, response 0: .*from 0 to 3"),
        (lambda output: output.routes[:, :1], r"routes of Wrapped, response 0: got"),
    ],
    ids=["none", "too many", "twice the same", "out of range", "a layer short"],
)
def test_what_an_engine_drops_or_breaks_is_refused_with_its_name(groups, change, message):
    with pytest.raises(RunError, match=r"model\.grpo\.routing_replay\.mode=R3: " + message):
        roll_out(groups, "R3", change)


def test_an_engine_that_can_not_tell_says_so(policy):
    engine = NativeEngine(policy, 32, 4)
    assert not engine.returns_routes
    with pytest.raises(ValueError, match="return_routes"):
        engine.generate([[3]], SamplingParams(4, 0.0, 1, return_routes=True), [0])
