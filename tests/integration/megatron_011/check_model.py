"""A GPTModel of the real Megatron-Core 0.11 takes the routes of another, with activations computed again or not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integration.megatron_011.parts import RECOMPUTE, K, make_config

LENGTHS = [[7, 4], [5, 7]]  # of two micro-batches
ROUTED = [[7, 4], [5, 6]]  # tokens with routes: the last token of the last response has none


def make_model(**options: Any) -> Any:
    """A GPTModel of a dense layer and two with experts; its routers keep their maps in ``router.maps``."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from nemo_sspo.compat import megatron_cpu

    megatron_cpu.install()  # for 0.16, but what this model asks of CUDA is the same
    model_parallel_cuda_manual_seed(1)
    fused = ("bias_dropout", "bias_activation", "masked_softmax", "gradient_accumulation")
    config = make_config(
        moe_layer_freq=[0, 1, 1], normalization="RMSNorm", init_method_std=0.2, hidden_dropout=0.0,
        attention_dropout=0.0, use_cpu_initialization=True, apply_rope_fusion=False,
        **{f"{name}_fusion": False for name in fused}, **options,
    )  # fmt: skip
    torch.manual_seed(0)
    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    model = GPTModel(config, spec, vocab_size=24, max_sequence_length=8, position_embedding_type="rope")
    for router in routers_of(model):
        router.maps = []
        router.register_forward_hook(lambda router, _, output: router.maps.append(output[1]))
    return model


def routers_of(model: Any) -> list[Any]:
    from nemo_sspo.compat import megatron_routing

    return [router for _, router in megatron_routing.routers(model)]


def forward(model: Any, number: int) -> Tensor:
    """Logits ``[2, 7, V]`` of one micro-batch."""
    tokens = torch.randint(24, (2, 7), generator=torch.Generator().manual_seed(number))
    return model(tokens, torch.arange(7).expand(2, 7), None)


def routes_used(model: Any, number: int, call: int) -> list[Tensor]:
    """Experts, ascending, of each response of a micro-batch in call `call` of the routers: ``[tokens, 2, K]``."""
    maps = torch.stack([router.maps[call] for router in routers_of(model)], 1)
    experts = maps.nonzero()[:, -1].view(7, 2, 2, K)  # a router sees [S * B, ...]
    return [experts[:length, row] for row, length in enumerate(LENGTHS[number])]


@pytest.mark.parametrize("recompute", RECOMPUTE)
def check_a_model_takes_the_routes_of_another(world, recompute):
    from nemo_sspo.routing import RoutingReplay
    from nemo_sspo.routing.hook import Action
    from nemo_sspo.routing.slots import Slots

    slots = [Slots.padded(lengths, rows=2, columns=7) for lengths in LENGTHS]
    old = make_model()
    recorder = RoutingReplay([old], old.config, world)
    with recorder.taking_part(Action.RECORD), torch.no_grad():
        for number in range(2):
            recorder.feed(old, slots[number])
            forward(old, number)
        routes = recorder.routes()
    assert [len(r) for r in routes] == [*LENGTHS[0], *LENGTHS[1]]
    for number in range(2):
        for row, used in enumerate(routes_used(old, number, number)):
            assert torch.equal(routes[2 * number + row].sort(-1).values.long(), used)

    def train(replay_routes: bool, recompute: str) -> tuple[Any, Any, dict[str, Tensor]]:
        model = make_model(**RECOMPUTE[recompute])
        with torch.no_grad():
            for router in routers_of(model):  # the weights have moved on since
                router.weight += 0.3 * torch.randn(router.weight.shape, generator=torch.Generator().manual_seed(1))
        replay = RoutingReplay([model], model.config, world)
        with replay.taking_part(Action.REPLAY if replay_routes else Action.NONE, training=True):
            losses = []
            for number in range(2):
                given = [routes[2 * number + row][:length] for row, length in enumerate(ROUTED[number])]
                replay.feed(model, slots[number], given)
                losses.append(forward(model, number).log_softmax(-1)[..., 0].sum())
            for loss in losses:
                loss.backward()
            stats = replay.stats() if replay_routes else None
        return model, stats, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    def given_and_used(model: Any) -> Iterator[tuple[Tensor, Tensor]]:
        for call in range(len(routers_of(model)[0].maps)):  # recomputing calls again, in the same order
            for row, used in enumerate(routes_used(model, call % 2, call)):
                length = ROUTED[call % 2][row]
                yield routes[2 * (call % 2) + row][:length].sort(-1).values.long(), used[:length]

    model, stats, grads = train(True, recompute)
    assert len(routers_of(model)[0].maps) == (2 if recompute == "none" else 4)
    assert all(torch.equal(given, used) for given, used in given_and_used(model))
    assert stats.replayed_fraction == 1.0
    assert all(0 < rate < 1 for rate in stats.mismatch_by_layer)
    model, _, free_grads = train(False, recompute)
    assert not all(torch.equal(given, used) for given, used in given_and_used(model))
    _, _, kept = train(True, "none")
    router = "decoder.layers.1.mlp.router.weight"
    assert grads.keys() == kept.keys()
    assert not torch.allclose(grads[router], free_grads[router], rtol=1e-3)
    for name, grad in kept.items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-5, msg=name)
