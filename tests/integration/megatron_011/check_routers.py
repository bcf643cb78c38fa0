"""Routers of the real Megatron-Core 0.11: they take given experts, and all around the choice stays Megatron's."""

from __future__ import annotations

import copy
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.integration.megatron_011.parts import EXPERTS, RECOMPUTE, TOKENS, K, make_config

WHEEL = Path(sys.prefix) / "megatron_core_0.11"
MISSING = 255


class Given:
    """Chooses the experts `ids` ``[n, K]``, or without any those of the router; keeps questions and answers."""

    def __init__(self, ids: Tensor | None = None) -> None:
        self.ids = ids
        self.asked: list[Tensor] = []
        self.answers: list[Tensor] = []

    def choose(self, scores: Tensor, top_k: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        values, ids = top_k(scores) if self.ids is None else (scores.gather(1, self.ids), self.ids)
        self.asked.append(scores.detach())
        self.answers.append(ids)
        return values, ids


def make_router(**options: Any) -> Any:
    from megatron.core.transformer.moe.router import TopKRouter

    torch.manual_seed(0)
    router = TopKRouter(make_config(**options))
    if router.expert_bias is not None:
        router.expert_bias.copy_(torch.linspace(-1, 1, EXPERTS))
    return router


def some_logits(seed: int = 0) -> Tensor:
    """``[S, B, E]``, a leaf."""
    return torch.randn(TOKENS // 2, 2, EXPERTS, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def distinct(seed: int = 0, tokens: int = TOKENS) -> Tensor:
    """Any ids ``[tokens, K]`` without the same expert twice for one token."""
    return torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(seed)).argsort(-1)[:, :K]


def as_map(ids: Tensor) -> Tensor:
    return torch.zeros(len(ids), EXPERTS, dtype=torch.bool).scatter(1, ids.long(), True)


def hooked(router: Any, **begin: Any) -> Any:
    """A router's ``RouterHook``, which has begun to replay."""
    from nemo_sspo.compat import megatron_routing
    from nemo_sspo.routing.hook import Action, RouterHook

    hook = RouterHook(layer=1, place=0)
    megatron_routing.attach(router, hook)
    hook.begin(Action.REPLAY, **begin)
    return hook


def target(ids: Tensor) -> Any:
    from nemo_sspo.routing.hook import Target

    routed = ids[:, 0] != MISSING
    return Target(ids.to(torch.uint8), routed, counted=routed)


SOFTMAX, PRE, SIGMOID = {}, {"moe_router_pre_softmax": True}, {"moe_router_score_function": "sigmoid"}
KINDS = {
    "softmax": SOFTMAX,
    "pre_softmax": PRE,
    "sigmoid": SIGMOID,
    "expert_bias": SIGMOID | {"moe_router_enable_expert_bias": True},
    "scaled": PRE | {"moe_router_topk_scaling_factor": 2.5},
    "groups": SOFTMAX | {"moe_router_num_groups": 4, "moe_router_group_topk": 1},
    "groups_pre_softmax": PRE | {"moe_router_num_groups": 4, "moe_router_group_topk": 2},
    "groups_sigmoid": SIGMOID | {"moe_router_num_groups": 2, "moe_router_group_topk": 1},
}
LOSSES = {
    "aux_loss": {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1},
    "seq_aux_loss": {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.1},
    "z_loss": {"moe_z_loss_coeff": 0.1},
    "drop_by_probs": {"moe_expert_capacity_factor": 0.5},
    "drop_by_position": {"moe_expert_capacity_factor": 0.5, "moe_token_drop_policy": "position"},
    "pad": {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True},
}
every_kind = pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)


def reference(logits: Tensor, ids: Tensor, options: dict[str, Any]) -> Tensor:
    """The probabilities ``[n, E]`` of given experts."""
    if options.get("moe_router_score_function") == "sigmoid":
        values = logits.sigmoid().gather(1, ids)
        values = values / values.sum(-1, keepdim=True)
    elif options.get("moe_router_pre_softmax"):
        values = logits.softmax(-1).gather(1, ids)
    else:
        values = logits.gather(1, ids).softmax(-1)
    values = values * options.get("moe_router_topk_scaling_factor", 1.0)
    return torch.zeros(len(logits), EXPERTS).scatter(1, ids, values)


def check_this_is_0_11_and_lacks_replay():
    import megatron.core

    assert megatron.core.__version__ == "0.11.0"
    assert Path(megatron.core.__file__).is_relative_to(WHEEL)
    with pytest.raises(ImportError):
        import megatron.core.transformer.moe.router_replay
    assert not hasattr(make_router(), "router_replay")


@every_kind
def check_given_experts_have_the_live_routers_probabilities_and_gradient(options):
    from nemo_sspo.compat import megatron_routing

    router, logits, ids, weights = make_router(**options), some_logits(), distinct(), torch.randn(TOKENS, EXPERTS)
    assert megatron_routing.attached(router) is None
    megatron_routing.attach(router, chooser := Given(ids))
    assert megatron_routing.attached(router) is chooser
    probs, chosen = router.routing(logits)
    (probs * weights).sum().backward()
    plain = some_logits()
    expected = reference(plain.view(TOKENS, EXPERTS), ids, options)
    (expected * weights).sum().backward()
    assert len(chooser.asked) == 1
    assert torch.isfinite(chooser.asked[0]).all()  # no group is hidden
    assert torch.equal(chosen, as_map(ids))
    assert plain.grad is not None and plain.grad.abs().max() > 0.01
    torch.testing.assert_close(probs, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(logits.grad, plain.grad, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", [*KINDS.values(), *LOSSES.values()], ids=[*KINDS, *LOSSES])
def check_what_is_around_the_choice_stays_megatrons(world, options):
    from nemo_sspo.compat import megatron_routing

    def outcome(chooser: Given | None) -> list[Tensor]:
        router, logits = make_router(**options), some_logits()
        if chooser is not None:
            megatron_routing.attach(router, chooser)
        probs, chosen = router.routing(logits)
        (probs * torch.linspace(0, 1, EXPERTS)).sum().backward()
        assert logits.grad is not None
        return [probs, chosen, logits.grad]

    plain, by_itself = outcome(None), Given()
    recorded = outcome(by_itself)
    replayed = outcome(given := Given(by_itself.answers[0]))
    assert (len(by_itself.asked), len(given.asked)) == (1, 1)
    for other in (recorded, replayed):
        assert all(torch.equal(got, wanted) for got, wanted in zip(other, plain, strict=True))


def check_the_auxiliary_loss_is_of_the_given_experts(world):
    from nemo_sspo.compat import megatron_routing

    router, logits, ids = make_router(**LOSSES["aux_loss"]), some_logits(), distinct()
    megatron_routing.attach(router, Given(ids))
    (router.routing(logits)[0] * 0).sum().backward()
    plain = some_logits()
    loads = as_map(ids).sum(0)
    scores = plain.view(TOKENS, EXPERTS).softmax(-1).sum(0)
    (0.1 * EXPERTS / (TOKENS * TOKENS * K) * (loads * scores).sum()).backward()
    assert plain.grad is not None and plain.grad.abs().max() > 1e-4
    torch.testing.assert_close(logits.grad, plain.grad, atol=1e-8, rtol=1e-5)


def check_no_other_router_is_asked():
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.moe import router as router_module

    from nemo_sspo.compat import megatron_routing

    names = ("torch", "group_limited_topk", "topk_softmax_with_capacity")
    before = [getattr(moe_utils, name) for name in names]
    asking, free, logits = make_router(), make_router(), some_logits()
    expected = free.routing(logits)[1]

    class Nosy(Given):
        """Routes with others while it is asked."""

        def choose(self, scores: Tensor, top_k: Any) -> tuple[Tensor, Tensor]:
            assert [getattr(moe_utils, name) for name in names] == before
            assert torch.equal(free.routing(logits)[1], expected)
            assert torch.equal(inner.routing(logits)[1], as_map(distinct(2)))
            return super().choose(scores, top_k)

    inner, ids = make_router(), distinct(1)
    megatron_routing.attach(asking, outer := Nosy(ids))
    megatron_routing.attach(inner, of_inner := Given(distinct(2)))
    assert torch.equal(asking.routing(logits)[1], as_map(ids))
    assert (len(outer.asked), len(of_inner.asked)) == (1, 1)
    assert type(free) is router_module.TopKRouter
    assert torch.equal(free.routing(logits)[1], expected)
    assert [getattr(moe_utils, name) for name in names] == before


@pytest.mark.parametrize("options", [SOFTMAX, KINDS["groups"]], ids=["softmax", "groups"])
def check_a_failure_leaves_nothing_behind(options):
    from megatron.core.transformer.moe import moe_utils

    from nemo_sspo.compat import megatron_routing

    before = moe_utils.torch, moe_utils.group_limited_topk
    router = make_router(**options)
    megatron_routing.attach(router, Given(distinct(tokens=TOKENS + 1)))
    with pytest.raises(RuntimeError, match="index"):
        router.routing(some_logits())
    assert (moe_utils.torch, moe_utils.group_limited_topk) == before
    router.score_function = "unheard of"
    with pytest.raises(ValueError, match="unheard of"):  # Megatron-Core's own, before it asks
        router.routing(some_logits())
    assert (moe_utils.torch, moe_utils.group_limited_topk) == before
    router.score_function = "softmax"
    megatron_routing.attach(router, Given(distinct()))
    assert torch.equal(router.routing(some_logits())[1], as_map(distinct()))


def check_a_router_is_still_itself():
    from megatron.core.transformer.moe.router import TopKRouter

    from nemo_sspo.compat import megatron_routing

    router, plain = make_router(), make_router()
    megatron_routing.attach(router, first := Given())
    megatron_routing.attach(router, second := Given())
    router.routing(some_logits())
    assert (len(first.asked), len(second.asked)) == (0, 1)
    assert isinstance(router, TopKRouter)
    assert router.state_dict().keys() == plain.state_dict().keys()
    twin = copy.deepcopy(router)
    twin.routing(some_logits())
    of_twin: Any = megatron_routing.attached(twin)
    assert (len(second.asked), len(of_twin.asked)) == (1, 2)
    gone = [weakref.ref(thing) for thing in (router, second)]
    del router, second
    assert [reference() for reference in gone] == [None, None]  # at once: nothing of the process holds them


@every_kind
def check_recorded_routes_are_those_used(options):
    from nemo_sspo.routing.hook import Action

    router = make_router(**options)
    hook = hooked(router)
    hook.begin(Action.RECORD)
    for seed in range(2):
        _, chosen = router.routing(some_logits(seed))
        assert torch.equal(as_map(hook.recorded[seed]), chosen)
    hook.begin(Action.NONE)
    assert torch.equal(router.routing(some_logits(1))[1], chosen)
    assert not hook.recorded


@every_kind
def check_tokens_without_a_route_get_the_live_routers_experts(options):
    router, logits, ids = make_router(**options), some_logits(), distinct()
    own = router.routing(logits)[1]
    ids[5::3] = MISSING
    hook = hooked(router)
    hook.target = target(ids)
    _, chosen = router.routing(logits)
    routed = ids[:, 0] != MISSING
    assert 0 < routed.sum() < TOKENS
    assert torch.equal(chosen[~routed], own[~routed])
    assert torch.equal(chosen[routed], as_map(ids[routed]))
    differing = sum(int(not own[token, expert]) for token in routed.nonzero()[:, 0] for expert in ids[token].long())
    assert (int(hook.replayed), int(hook.differing)) == (int(routed.sum()), differing)
    assert differing > 0


@every_kind
def check_a_routers_own_experts_are_no_mismatch(options):
    router = make_router(**options)
    own = router.routing(some_logits())[1].nonzero()[:, 1].view(TOKENS, K)
    hook = hooked(router)
    hook.target = target(own.flip(1))
    assert torch.equal(router.routing(some_logits())[1], as_map(own))
    assert (int(hook.replayed), int(hook.differing)) == (TOKENS, 0)


@every_kind
def check_recomputing_gets_each_micro_batch_its_own_experts(options):
    ids = [distinct(3), distinct(4)]
    weights = torch.randn(TOKENS, EXPERTS)

    def gradients(recompute: bool) -> list[Any]:
        router, inputs = make_router(**options), [some_logits(0), some_logits(1)]
        hook = hooked(router, training=True)
        losses = []
        for logits, given in zip(inputs, ids, strict=True):  # both forward, then both backward, as in a pipeline
            hook.target = target(given)
            go = router.routing if not recompute else lambda x: checkpoint(router.routing, x, use_reentrant=True)
            probs, chosen = go(logits)
            assert torch.equal(chosen, as_map(given))
            losses.append((probs * weights).sum())
        assert hook.unfinished == recompute
        for loss in losses:
            loss.backward()
        assert (hook.calls, hook.unfinished, int(hook.replayed)) == (2, False, 2 * TOKENS)
        return [logits.grad for logits in inputs]

    for recomputed, kept in zip(gradients(True), gradients(False), strict=True):
        assert kept is not None and kept.abs().max() > 0.01
        assert torch.equal(recomputed, kept)


def check_formats_and_options():
    from nemo_sspo.errors import UserError
    from nemo_sspo.routing.options import check_options
    from nemo_sspo.routing.routes import RouteFormat

    assert RouteFormat.of(make_config(moe_layer_freq=2)) == RouteFormat((1, 3), EXPERTS, K)
    assert RouteFormat.of(make_config(moe_layer_freq=[0, 1, 1])) == RouteFormat((2, 3), EXPERTS, K)
    for options in ({}, {"moe_expert_capacity_factor": -1.0}, LOSSES["seq_aux_loss"], *KINDS.values()):
        check_options(make_config(**options))
    for name, value in (
        ("moe_token_dispatcher_type", "alltoall_seq"),
        ("moe_router_load_balancing_type", "sinkhorn"),
        ("moe_expert_capacity_factor", 1.0),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
    ):
        with pytest.raises(UserError, match=f"model.{name}: got {value!r}"):
            check_options(make_config(**{name: value}))
    check_options(make_config(**RECOMPUTE["full"]))
    check_options(make_config(**RECOMPUTE["moe"]))
    with pytest.raises(UserError, match=r"model\.moe_layer_recompute: got True"):
        check_options(make_config(**RECOMPUTE["full"], **RECOMPUTE["moe"]))
