"""Routing replay under every layout: what is replayed is what was recorded, and gradients are a single process's.

Four MoE layers, float32, uneven prompts and responses. Which experts a token really went to is read off the routers'
own output, the routing map, with the order of tokens spelt out here once more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_sspo.data.responses import ResponseBatch
from nemo_sspo.generation import GenerationOutput, SamplingParams
from nemo_sspo.parallel.reductions import all_gather_list, local_share
from tests.distributed.launch import each, run_ranks
from tests.distributed.layouts import LAYOUTS, MICRO_BATCH, MODEL, ROWS, Layout, gather, gradients, loss_of
from tests.tiny import VOCAB, make_batch, tiny_config, uneven_batch

pytestmark = pytest.mark.distributed

LAYERS, EXPERTS, K = 4, 4, 2
TEMPERATURE = 0.9
INIT = "model.init_method_std=0.04"  # log-probabilities above -4, where float32 has steps of 2.4e-7
FORWARD_SIZES = (MICRO_BATCH, 6)  # both make an even number of micro-batches, as interleaved stages want it
RECOMPUTE = {
    "moe": "activations_checkpoint_granularity=selective",
    "full": "activations_checkpoint_granularity=full,activations_checkpoint_method=uniform,"
    "activations_checkpoint_num_layers=1",
    "block": "activations_checkpoint_granularity=full,activations_checkpoint_method=block,"
    "activations_checkpoint_num_layers=1",
}


def _recomputed(name: str, recompute: str) -> Layout:
    keys = dict(item.split("=") for item in RECOMPUTE[recompute].split(","))
    return LAYOUTS[name]._replace(keys=LAYOUTS[name].keys | keys)


CASES = LAYOUTS | {
    f"{name}_{recompute}": _recomputed(name, recompute)
    for name in ("single", "tp2_ep2_pp2", "pp2_vpp2")
    for recompute in RECOMPUTE
    if (name, recompute) != ("pp2_vpp2", "block")
}


# -- on every rank ------------------------------------------------------------------------------------------------


def replay_all(rank: int, size: int, cases: dict[str, Layout]) -> dict[str, dict[str, Any]]:
    """`replay` for one layout after another."""
    return each({name: (rank, layout) for name, layout in cases.items()}, replay)


def replay(rank: int, layout: Layout) -> dict[str, Any]:
    """Everything that the tests look at; weights and gradients on rank 0 only."""
    with actor_of(layout) as (actor, groups):
        batch = uneven_batch(rows=ROWS)
        share = local_share(len(batch), groups.dp_cp)
        local, given = batch.select(share), given_routes(batch)
        old, _, recorded = actor.record_routes(local, FORWARD_SIZES[1], TEMPERATURE)
        lengths = (local.prompt_lengths + local.response_lengths).tolist()
        result: dict[str, Any] = {
            "recorded": all_gather_list([r.tolist() for r in recorded], groups.dp_cp),
            "rows_are_tokens": [len(r) for r in recorded] == lengths,
            "unchanged": [log_ratio(actor, replace(local, routes=recorded), old, size) for size in FORWARD_SIZES],
            "others": log_ratio(actor, replace(local, routes=given[share]), old, MICRO_BATCH),
        }

        # Given routes that the router would not choose, and some tokens without any: as a single process does.
        outcome = actor.step(replace(batch, routes=given), loss_of(batch), TEMPERATURE)
        result |= {"loss": outcome.loss, "grad_norm": outcome.grad_norm, "stats": outcome.routing}
        result["gradients"] = gather(actor.policy, gradients(actor))

        everyone = gather_local(recorded, groups)
        for seed in range(1, 3):  # the weights change
            other = uneven_batch(rows=ROWS, seed=seed)
            actor.step(other, loss_of(other), TEMPERATURE)
        with watched_routers(actor.policy) as seen:
            changed = actor.step(replace(batch, routes=everyone), loss_of(batch), TEMPERATURE)
        result["wrong"] = wrong_routes(actor, seen, batch.select(share), recorded, groups)
        result["changed_stats"] = changed.routing
        _, _, now = actor.record_routes(local, FORWARD_SIZES[1], TEMPERATURE)
        result["natural_mismatch"] = differing(recorded, now)
    if rank:
        del result["gradients"]
    return result


class Dense(torch.nn.Module):
    """A layer without experts."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return 0.1 * hidden, None


@contextmanager
def actor_of(layout: Layout, dense: Collection[int] = ()) -> Iterator[tuple[Any, Any]]:
    """The small model under a layout, with the hooks of routing replay, and its groups.

    Layers whose global numbers are in `dense` lose their experts.
    """
    from nemo_sspo.config.schema import OptimizerConfig
    from nemo_sspo.model import build_model
    from nemo_sspo.routing import RoutingReplay
    from nemo_sspo.training.actor import Actor
    from nemo_sspo.training.distributed import model_parallel_groups

    config = tiny_config(*MODEL, INIT, *layout.overrides)
    with model_parallel_groups(config.model) as groups:
        policy = build_model(config.model, VOCAB, groups, config.trainer.precision)
        if policy.config.recompute_granularity == "selective":  # of the experts and their router, not only of attention
            for layer in (layer for chunk in policy.chunks for layer in chunk.decoder.layers):
                layer.mlp.moe_layer_recompute = True
        for layer in (layer for chunk in policy.chunks for layer in chunk.decoder.layers):
            if layer.layer_number in dense:
                layer.mlp = Dense()
        policy.config.moe_layer_freq = [int(number not in dense) for number in range(1, LAYERS + 1)]
        routing = RoutingReplay(policy.chunks, policy.config, groups)
        actor = Actor(policy, MICRO_BATCH, layout.distributed_optimizer, routing)
        actor.set_optimizer(OptimizerConfig(lr=3e-3, eps=1e-5), clip_grad=0.5, total_steps=10)
        yield actor, groups


def log_ratio(actor: Any, batch: ResponseBatch, old: Tensor, size: int) -> float:
    new, _ = actor.logprobs(batch, size, TEMPERATURE)
    return float((new - old).abs().max())


def given_routes(batch: ResponseBatch, whole: bool = False) -> list[Tensor]:
    """Random distinct experts; two rows short for every third response, no route for some tokens in between."""
    generator = torch.Generator().manual_seed(7)
    routes = []
    for i, length in enumerate((batch.prompt_lengths + batch.response_lengths).tolist()):
        scores = torch.rand(length - 2 * (i % 3 == 0) * (not whole), LAYERS, EXPERTS, generator=generator)
        ids = scores.argsort(-1)[..., :K].to(torch.uint8)
        if not whole:
            ids[torch.rand(ids.shape[:2], generator=generator) < 0.1] = 255
        routes.append(ids)
    return routes


def gather_local(routes: list[Tensor], groups: Any) -> list[Tensor]:
    from nemo_sspo.routing import gather_routes

    return gather_routes(routes, groups.dp_cp)


@contextmanager
def watched_routers(policy: Any) -> Iterator[dict[int, list[tuple[bool, Tensor]]]]:
    """Global layer number -> (whether gradients were on, routing map) of its router's calls, in order."""
    seen: dict[int, list[tuple[bool, Tensor]]] = {}
    handles = []
    for chunk in policy.chunks:
        for layer in (layer for layer in chunk.decoder.layers if hasattr(layer.mlp, "router")):
            calls = seen.setdefault(layer.layer_number, [])

            def watch(module: Any, given: Any, output: Any, calls: list = calls) -> None:
                calls.append((torch.is_grad_enabled(), output[1]))

            handles.append(layer.mlp.router.register_forward_hook(watch))
    yield seen
    for handle in handles:
        handle.remove()


def wrong_routes(actor: Any, seen: dict, local: ResponseBatch, routes: list[Tensor], groups: Any) -> dict[str, int]:
    """How often a token went to other experts than `routes` say, or padding not to K of them, in how many calls.

    A layer that is computed again in backward has two calls for a micro-batch, the first without gradients.
    """
    pieces, tp = local.split(MICRO_BATCH), groups.tp
    counts = {"wrong": 0, "calls": 0, "again": 0}
    for layer, calls in seen.items():  # by global number
        first = [chosen for grad, chosen in calls if not grad]
        again = [chosen for grad, chosen in calls if grad]
        counts["again"] += len(again) if first else 0
        for passes in filter(None, (first, again)):
            for number, (piece, chosen) in enumerate(zip(pieces, passes, strict=True)):
                rows = MICRO_BATCH if groups.pp.size() > 1 else len(piece)
                offset = tp.rank() * len(chosen) if actor.policy.config.sequence_parallel else 0
                counts["calls"] += 1
                for slot, experts in enumerate(chosen, start=offset):
                    position, row = slot // rows, slot % rows
                    taken = set(experts.nonzero().flatten().tolist())
                    real = row < len(piece) and position < len(routes[number * MICRO_BATCH + row])
                    place = actor.routing.form.layers.index(layer)
                    given = routes[number * MICRO_BATCH + row][position, place].tolist() if real else []
                    counts["wrong"] += taken != set(given) if real else len(taken) != K
    return counts


def differing(before: list[Tensor], after: list[Tensor]) -> float:
    """Share of the experts of `before` that are not in `after`."""
    old, new = torch.cat(before), torch.cat(after)
    return float((old[..., :, None] != new[..., None, :]).all(-1).float().mean())


# -- tests --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Callable[[str], list[dict[str, Any]]]:
    """What every rank of a case gives back."""

    @cache
    def of_size(size: int) -> list[dict[str, dict[str, Any]]]:
        cases = {name: layout for name, layout in CASES.items() if layout.processes == size}
        return run_ranks(replay_all, size, tmp_path_factory.mktemp("ranks"), cases, limit=240.0)

    return lambda name: [by_name[name] for by_name in of_size(CASES[name].processes)]


@pytest.mark.parametrize("name", CASES)
def test_unchanged_weights_give_unchanged_log_probabilities(results, name):
    """In any micro-batch split; with other experts they differ, so the check can fail."""
    for result in results(name):
        assert max(result["unchanged"]) <= 1e-6
        assert result["others"] > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_every_token_goes_where_it_was_recorded_to_go(results, name):
    """After the weights have changed, in the forward pass and where backward computes it again."""
    for result in results(name):
        counts = result["wrong"]
        assert counts["wrong"] == 0
        assert counts["calls"] > 0
        assert (counts["again"] > 0) == ("activations_checkpoint_granularity" in CASES[name].keys)
        assert result["rows_are_tokens"]
        assert result["changed_stats"].replayed_fraction == 1.0
        assert all(0 < rate < 0.5 for rate in result["changed_stats"].mismatch_by_layer)
        assert 0 < result["natural_mismatch"] < 0.5  # the router by itself would choose otherwise


@pytest.mark.parametrize("name", [name for name in CASES if name != "single"])
def test_gradients_with_given_routes_equal_a_single_process(results, name):
    (single,), result = results("single"), results(name)[0]
    assert result["loss"] == pytest.approx(single["loss"], rel=1e-5)
    assert result["grad_norm"] == pytest.approx(single["grad_norm"], rel=1e-5)
    assert result["stats"].replayed_fraction == pytest.approx(single["stats"].replayed_fraction, abs=1e-12)
    assert 0.5 < single["stats"].replayed_fraction < 0.95  # some tokens have no route
    assert result["stats"].mismatch_by_layer == pytest.approx(single["stats"].mismatch_by_layer, abs=2e-2)
    for key, expected in single["gradients"].items():
        difference = (result["gradients"][key] - expected).abs().max()
        assert difference <= 1e-5 * expected.abs().max(), key


@pytest.mark.parametrize("name", [name for name in CASES if name != "single"])
def test_routes_are_recorded_alike(results, name):
    """By every layout, in the order of rows and layers; a tie of rounding errors may fall either way."""
    (single,) = results("single")
    mine, theirs = results(name)[0]["recorded"], single["recorded"]
    assert [len(rows) for rows in mine] == [len(rows) for rows in theirs]
    differs = [a != b for rows in zip(mine, theirs, strict=True) for a, b in zip(*rows, strict=True)]
    assert sum(differs) <= len(differs) // 50


# -- layers without experts -----------------------------------------------------------------------------------------

DENSE = {"first": (1,), "first two": (1, 2), "alternating": (2, 4)}  # of "first two" a stage of pp2 has no experts


def replay_some_layers(rank: int, size: int, layout: Layout) -> dict[str, Any]:
    """By case of `DENSE`: the shape of recorded routes, and where the tokens went on replay of other ones."""
    results = {}
    for name, dense in DENSE.items():
        with actor_of(layout, dense) as (actor, groups):
            batch = uneven_batch(rows=ROWS)
            _, _, recorded = actor.record_routes(batch, FORWARD_SIZES[1], TEMPERATURE)
            given = [routes[:, : LAYERS - len(dense)] for routes in given_routes(batch, whole=True)]
            with watched_routers(actor.policy) as seen:
                actor.logprobs(replace(batch, routes=given), MICRO_BATCH, TEMPERATURE)
            results[name] = {
                "recorded": [routes.tolist() for routes in recorded],
                "wrong": wrong_routes(actor, seen, batch, given, groups),
                "layers": list(actor.routing.form.layers),
            }
    return results


def test_layers_without_experts_shift_nothing(tmp_path):
    """On any pipeline stage, interleaved or not."""
    (single,) = run_ranks(replay_some_layers, 1, tmp_path, LAYOUTS["single"])
    for layout in ("pp2", "pp2_vpp2"):
        for result in run_ranks(replay_some_layers, 2, tmp_path, LAYOUTS[layout]):
            for name, dense in DENSE.items():
                assert result[name]["layers"] == [n for n in range(1, LAYERS + 1) if n not in dense]
                assert result[name]["wrong"]["wrong"] == 0
                assert result[name]["recorded"] == single[name]["recorded"]


def gather_wide(rank: int, size: int) -> list[list]:
    from nemo_sspo.parallel.ranks import world
    from nemo_sspo.routing import gather_routes

    mine = [torch.full((tokens, 2, 3), 300 * rank - 1, dtype=torch.int16) for tokens in (1 + rank, 2)]
    return [routes.tolist() for routes in gather_routes(mine, world())]


def test_wide_routes_travel_over_a_backend_without_their_type(tmp_path):
    expected = [torch.full((n, 2, 3), v).tolist() for n, v in ((1, -1), (2, -1), (2, 299), (2, 299))]
    assert run_ranks(gather_wide, 2, tmp_path) == [expected, expected]


# -- R3: from a generation under one layout to training under another -------------------------------------------------

PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 2, 3, 4], [12, 13], [14, 15, 16, 17], [5, 5]]
SAMPLING = SamplingParams(12, TEMPERATURE, stop_id=1, return_routes=True)
PP2_EP2 = Layout(4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2})


def generate(rank: int, size: int, layout: Layout) -> list[GenerationOutput]:
    """One response a prompt, with its routes, of all ranks."""
    from nemo_sspo.generation.native import NativeEngine

    with actor_of(layout) as (actor, groups):
        engine = NativeEngine(actor.policy, 32, 2, actor.routing)
        share = local_share(len(PROMPTS), groups.dp_cp)
        answers = engine.generate(PROMPTS[share], SAMPLING, range(len(PROMPTS))[share])
        return all_gather_list(answers, groups.dp_cp)


def train_on(rank: int, size: int, layout: Layout, outputs: list[GenerationOutput]) -> dict[str, Any]:
    """Log-probabilities of the responses, replayed, and where a training step's tokens went."""
    with actor_of(layout) as (actor, groups):
        routes = [actor.routing.form.pack(output.routes, "the engine") for output in outputs]
        batch = replace(make_batch(PROMPTS, [output.token_ids for output in outputs]), routes=routes)
        local = batch.select(local_share(len(batch), groups.dp_cp))
        logprobs, _ = actor.logprobs(local, MICRO_BATCH, TEMPERATURE)
        with watched_routers(actor.policy) as seen:
            outcome = actor.step(batch, loss_of(batch), TEMPERATURE)
        rows = [row[:n].tolist() for row, n in zip(logprobs, local.response_lengths.tolist(), strict=True)]
        return {
            "logprobs": all_gather_list(rows, groups.dp_cp),
            "wrong": wrong_routes(actor, seen, local, local.routes, groups),
            "stats": outcome.routing,
        }


@pytest.mark.parametrize(
    ("generation", "training"), [("tp2_ep2", "pp2_ep2"), ("pp2_ep2", "tp2_ep2"), ("pp2_vpp2", "single")]
)
def test_routes_of_a_generation_are_replayed_under_another_layout(tmp_path, generation, training):
    layouts = LAYOUTS | {"pp2_ep2": PP2_EP2}
    outputs = run_ranks(generate, layouts[generation].processes, tmp_path, layouts[generation])[0]
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.routes.shape == (len(prompt) + len(output.token_ids) - 1, LAYERS, K)
        assert output.routes.dtype == torch.uint8
    for result in run_ranks(train_on, layouts[training].processes, tmp_path, layouts[training], outputs):
        assert result["wrong"]["wrong"] == 0
        assert result["wrong"]["calls"] > 0
        assert result["stats"].replayed_fraction == 1.0
        for mine, output in zip(result["logprobs"], outputs, strict=True):
            assert mine == pytest.approx(output.logprobs, abs=1e-5)
