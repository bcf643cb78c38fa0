"""An MoE layer with given routes against a dense one: every expert computed, the given ones gathered, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_sspo.model import build_model
from nemo_sspo.routing import RoutingReplay
from nemo_sspo.routing.hook import Action, Target
from nemo_sspo.routing.slots import Slots
from tests.tiny import VOCAB, tiny_config

EXPERTS, K, S, B = 4, 2, 7, 3


def dense(hidden: Tensor, router: Tensor, fc1: list[Tensor], fc2: list[Tensor], ids: Tensor) -> Tensor:
    """``[n, H]`` -> ``[n, H]``: softmax over the given experts' logits, SwiGLU experts."""
    outputs = []
    for w1, w2 in zip(fc1, fc2, strict=True):
        gate, up = (hidden @ w1.T).chunk(2, dim=-1)
        outputs.append((torch.nn.functional.silu(gate) * up) @ w2.T)
    every = torch.stack(outputs, 1)  # [n, E, H]
    weights = (hidden @ router.T).gather(1, ids).softmax(-1)
    return (weights[..., None] * every.gather(1, ids[..., None].expand(-1, -1, hidden.shape[1]))).sum(1)


def replayed(layer: Any, routing: Any, hidden: Tensor, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Output of Megatron-Core's layer with the given experts, and gradients of its input and its weights."""
    hidden = hidden.clone().requires_grad_()
    weights = [layer.router.weight, *fc(layer, "linear_fc1"), *fc(layer, "linear_fc2")]
    with routing.taking_part(Action.REPLAY, training=True):
        hook = routing.hooks()[0]
        every = torch.ones(len(ids), dtype=torch.bool)
        hook.target = Target(ids.to(torch.uint8), every, every)
        output = layer(hidden)[0]
        (output * WEIGHTS).sum().backward()
    gradients = [tensor.grad for tensor in (hidden, *weights)]
    for tensor in weights:
        tensor.grad = None
    return output.detach(), gradients


def fc(layer: Any, name: str) -> list[Tensor]:
    return [getattr(expert, name).weight for expert in layer.experts.local_experts]


GENERATOR = torch.Generator().manual_seed(0)
HIDDEN = torch.randn(S, B, 32, generator=GENERATOR)
WEIGHTS = torch.randn(S, B, 32, generator=GENERATOR)
IDS = torch.rand(S * B, EXPERTS, generator=GENERATOR).argsort(-1)[:, :K]


@pytest.fixture
def layer(groups) -> tuple[Any, Any]:
    """The first MoE layer of a small model, and the routing of the model."""
    policy = build_model(tiny_config().model, VOCAB, groups)
    policy.chunks[0].train()
    return policy.chunks[0].decoder.layers[0].mlp, RoutingReplay(policy.chunks, policy.config, groups)


def test_output_and_gradients_equal_a_dense_layer(layer):
    """Of the input, the router's weight and every expert, to 1e-6 of the largest value."""
    moe, routing = layer
    output, gradients = replayed(moe, routing, HIDDEN, IDS)
    wide = [
        w.detach().double().requires_grad_()
        for w in (moe.router.weight, *fc(moe, "linear_fc1"), *fc(moe, "linear_fc2"))
    ]
    hidden = HIDDEN.double().requires_grad_()
    expected = dense(hidden.flatten(0, 1), wide[0], wide[1 : 1 + EXPERTS], wide[1 + EXPERTS :], IDS).view(S, B, -1)
    reference = torch.autograd.grad((expected * WEIGHTS).sum(), [hidden, *wide])
    for mine, theirs in zip([output, *gradients], [expected, *reference], strict=True):
        assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()
    assert gradients[1].abs().max() > 0.1  # the router learns


def test_the_router_by_itself_would_give_others(layer):
    """So that the comparison can fail."""
    moe, _ = layer
    own = moe(HIDDEN)[0]
    expected = dense(HIDDEN.flatten(0, 1), moe.router.weight, fc(moe, "linear_fc1"), fc(moe, "linear_fc2"), IDS)
    assert (own - expected.view(S, B, -1)).abs().max() > 1e-2


def test_computing_again_changes_nothing(layer):
    moe, routing = layer
    output, gradients = replayed(moe, routing, HIDDEN, IDS)
    moe.moe_layer_recompute = True
    again, recomputed = replayed(moe, routing, HIDDEN, IDS)
    assert torch.equal(output, again)
    for mine, theirs in zip(recomputed, gradients, strict=True):
        assert (mine - theirs).abs().max() <= 1e-6 * theirs.abs().max()


def test_a_packed_row(layer):
    """Two responses one after another, each padded to a multiple of 4: every token goes where its route says."""
    moe, routing = layer
    lengths, padded = [5, 3], [8, 4]
    routes = [part[:, None].repeat(1, 2, 1).to(torch.uint8) for part in IDS[:8].split(lengths)]
    hidden = torch.randn(sum(padded), 1, 32, generator=torch.Generator().manual_seed(1))
    maps: list[Tensor] = []
    moe.router.register_forward_hook(lambda module, given, output: maps.append(output[1]))
    with routing.taking_part(Action.REPLAY):
        routing.feed(routing._chunks[0], Slots.packed(lengths, padded, len(hidden)), routes)
        moe(hidden)
    taken = [row.nonzero().flatten().tolist() for row in maps[0]]
    expected = [sorted(ids) for ids in IDS[:8].tolist()]
    assert taken[:5] + taken[8:11] == expected
    assert all(len(ids) == K for ids in taken)
