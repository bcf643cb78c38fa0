"""A chooser at Megatron-Core's routers: it decides which experts, and nothing else; no list of the process knows it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_sspo.compat import megatron_cpu, megatron_routing
from nemo_sspo.errors import UserError
from nemo_sspo.model import build_model, transformer_config
from nemo_sspo.routing.options import check_options
from tests.tiny import VOCAB, tiny_config

EXPERTS, K, HIDDEN = 4, 2, 32


class Given:
    """Chooses the experts `ids` ``[n, K]``, or without any those of the router; keeps what it was asked with."""

    def __init__(self, ids: Tensor | None = None) -> None:
        self.ids = ids
        self.asked: list[Tensor] = []

    def choose(self, scores: Tensor, top_k: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        self.asked.append(scores.detach())
        return top_k(scores) if self.ids is None else (scores.gather(1, self.ids), self.ids)


def distinct(tokens: int, experts: int = EXPERTS, k: int = K, seed: int = 0) -> Tensor:
    """Any ids ``[tokens, k]`` without the same expert twice for one token."""
    return torch.rand(tokens, experts, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :k]


def make_router(groups, **options: Any):
    """A router ``[n, 1, 32] -> [n, E]`` by itself, under the tiny model's configuration but for `options`."""
    from megatron.core.transformer.moe.router import TopKRouter

    config = dataclasses.replace(transformer_config(tiny_config().model), **options)
    megatron_cpu.install()
    torch.manual_seed(0)
    return TopKRouter(config, pg_collection=groups)


def reference(logits: Tensor, ids: Tensor, pre_softmax: bool, score: str, experts: int) -> Tensor:
    """The probabilities ``[n, E]`` of given experts."""
    if score == "sigmoid":
        values = logits.sigmoid().gather(1, ids)
        values = values / values.sum(-1, keepdim=True)
    elif pre_softmax:
        values = logits.softmax(-1).gather(1, ids)
    else:
        values = logits.gather(1, ids).softmax(-1)
    return torch.zeros(len(logits), experts).scatter(1, ids, values)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"moe_router_pre_softmax": True},
        {"moe_router_score_function": "sigmoid"},
        {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        {"moe_router_dtype": None},
    ],
    ids=["softmax", "pre_softmax", "sigmoid", "expert_bias", "model_dtype"],
)
def test_given_experts_have_the_live_routers_probabilities_and_gradient(groups, options):
    router = make_router(groups, **options)
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.tensor([5.0, 0.0, 0.0, -5.0]))  # decides the router's own choice, no more
    ids, weights = distinct(7), torch.randn(7, EXPERTS)
    hidden = torch.randn(7, 1, HIDDEN, requires_grad=True)
    chooser = Given(ids)
    megatron_routing.attach(router, chooser)
    probs, chosen = router(hidden)
    (probs * weights).sum().backward()

    weight = router.weight.detach().clone().requires_grad_()
    plain = hidden.detach().clone().requires_grad_()
    score = options.get("moe_router_score_function", "softmax")
    logits = plain.view(7, HIDDEN) @ weight.T
    expected = reference(logits, ids, options.get("moe_router_pre_softmax", False), score, EXPERTS)
    (expected * weights).sum().backward()
    assert len(chooser.asked) == 1
    assert torch.equal(chosen, torch.zeros(7, EXPERTS, dtype=torch.bool).scatter(1, ids, True))
    assert weight.grad is not None and weight.grad.abs().max() > 0.1
    for got, wanted in ((probs, expected), (router.weight.grad, weight.grad), (hidden.grad, plain.grad)):
        torch.testing.assert_close(got, wanted, atol=1e-6, rtol=1e-5)


def test_a_given_expert_of_any_group_has_its_own_score(groups):
    options = {"moe_router_num_groups": 2, "moe_router_group_topk": 1, "moe_router_pre_softmax": True}
    router, hidden = make_router(groups, **options), torch.randn(9, 1, HIDDEN)
    across = torch.tensor([[0, 3]]).expand(9, K)  # an expert of each group; by itself it takes both from one
    megatron_routing.attach(router, chooser := Given(across))
    probs, _ = router(hidden)
    logits = hidden.view(9, HIDDEN) @ router.weight.T
    torch.testing.assert_close(probs, reference(logits, across, True, "softmax", EXPERTS), atol=1e-6, rtol=1e-5)
    chooser.ids = None
    own = router(hidden)[1].view(9, 2, 2).any(-1)
    assert own.sum(-1).tolist() == [1] * 9


def test_attached(groups):
    router = make_router(groups)
    assert megatron_routing.attached(router) is None
    assert megatron_routing.attached(SimpleNamespace()) is None
    first, second = Given(), Given()
    megatron_routing.attach(router, first)
    assert megatron_routing.attached(router) is first
    megatron_routing.attach(router, second)
    assert megatron_routing.attached(router) is second
    router(torch.randn(3, 1, HIDDEN))
    assert (len(first.asked), len(second.asked)) == (0, 1)


def test_a_chooser_that_leaves_the_choice_to_the_router_changes_nothing(groups):
    plain, asking, hidden = make_router(groups), make_router(groups), torch.randn(6, 1, HIDDEN)
    megatron_routing.attach(asking, Given())
    for got, wanted in zip(asking(hidden), plain(hidden), strict=True):
        assert torch.equal(got, wanted)


def test_other_routers_are_not_asked(policy, groups):
    other = build_model(tiny_config().model, VOCAB, groups)  # of the same seed, so with the same weights
    (number, router), (_, neighbour) = megatron_routing.routers(policy.chunks[0])
    megatron_routing.attach(router, chooser := Given(distinct(6)))
    hidden = torch.randn(6, 1, HIDDEN)
    router(hidden)
    for free in (neighbour, *(r for _, r in megatron_routing.routers(other.chunks[0]))):
        assert megatron_routing.attached(free) is None
        logits = hidden.view(6, HIDDEN) @ free.weight.T
        assert torch.equal(free(hidden)[1].nonzero()[:, 1].view(6, K), logits.topk(K).indices.sort().values)
    assert (number, len(chooser.asked)) == (1, 1)


def test_no_list_of_the_process_knows_a_chooser(policy):
    from megatron.core.transformer.moe.router_replay import RouterReplay

    before = list(RouterReplay.global_router_replay_instances)
    for _, router in megatron_routing.routers(policy.chunks[0]):
        megatron_routing.attach(router, Given())
        router(torch.randn(3, 1, HIDDEN))
    assert RouterReplay.global_router_replay_instances == before


def test_routers_are_those_of_the_decoder_by_global_number(groups):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = dataclasses.replace(
        transformer_config(tiny_config("model.num_layers=4").model), moe_layer_freq=[0, 1, 0, 1], mtp_num_layers=1
    )
    spec: Any = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    mtp: Any = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
    megatron_cpu.install()
    model: Any = GPTModel(
        config, spec, vocab_size=VOCAB, max_sequence_length=8, position_embedding_type="rope", mtp_block_spec=mtp,
        pg_collection=groups,
    )  # fmt: skip
    found = list(megatron_routing.routers(model))
    assert [number for number, _ in found] == [2, 4]
    assert all(router is model.decoder.layers[number - 1].mlp.router for number, router in found)
    everywhere = [m for m in model.modules() if type(m).__name__ == "TopKRouter"]
    (of_mtp,) = [m for m in everywhere if all(m is not router for _, router in found)]
    assert of_mtp is model.mtp.layers[0].transformer_layer.mlp.router
    for _, router in found:
        megatron_routing.attach(router, Given())
    assert megatron_routing.attached(of_mtp) is None


def test_the_list_of_the_process_is_still_there():
    """Fails when a ``RouterReplay`` enters no list of the process any more: then `megatron_routing` may go."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    known = RouterReplay.global_router_replay_instances
    replay = RouterReplay()
    assert known and known[-1] is replay
    known.pop()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("moe_router_fusion", True),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_router_load_balancing_type", ["aux_loss", "sinkhorn"]),
        ("moe_router_force_load_balancing", True),
        ("moe_token_dispatcher_type", "alltoall_seq"),
        ("moe_expert_capacity_factor", 1.0),
        ("moe_expert_capacity_factor", 0.0),
        ("cuda_graph_impl", "local"),
        ("cuda_graph_impl", "transformer_engine"),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
    ],
)
def test_options_that_skip_or_undo_replay_are_refused(name, value):
    config = transformer_config(tiny_config().model)
    check_options(config)
    setattr(config, name, value)
    with pytest.raises(UserError) as error:
        check_options(config)
    message = str(error.value)
    assert message.startswith(f"model.{name}: got {value!r}, allowed")
    assert "model.grpo.routing_replay" in message


def test_recomputing_experts_is_refused_within_recomputed_layers_only():
    config = SimpleNamespace(moe_layer_recompute=True, recompute_granularity="full")
    with pytest.raises(UserError, match=r"model\.moe_layer_recompute: got True, allowed with model\.grpo"):
        check_options(config)
    for moe, granularity in ((True, "selective"), (True, None), (False, "full")):
        check_options(SimpleNamespace(moe_layer_recompute=moe, recompute_granularity=granularity))


@pytest.mark.parametrize("balancing", ["aux_loss", "seq_aux_loss", "global_aux_loss", "none", ["aux_loss", "none"]])
def test_other_kinds_of_load_balancing_are_allowed(balancing):
    check_options(SimpleNamespace(moe_router_load_balancing_type=balancing))
