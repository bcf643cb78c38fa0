"""A say in which experts Megatron-Core's routers choose.

What: an object of ours stands where a `TopKRouter` keeps its ``RouterReplay`` (`attach`).
Versions: megatron-core 0.16; and 0.11, whose routers have no such place and get one (`megatron_011`).
Why: Megatron-Core enters every ``RouterReplay`` in one list of the process, so that routes are handed out by the order
in which routers were ever made: a second model, a second decoder or one that is long gone shifts them all. Its two
actions for replay need a switch between forward and backward, which pipeline schedules interleave.
When it can go: when routes can be given to a router by its layer. `tests/unit/compat` fails when the list is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch import Tensor

from nemo_sspo.compat import megatron_011


class Chooser(Protocol):
    """Chooses experts for one router."""

    def choose(self, scores: Tensor, top_k: Callable[[Tensor], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Values and ids ``[n, K]`` for scores ``[n, E]``; `top_k` is what the router would do by itself."""
        ...


class _Replay:
    """What Megatron-Core calls for the top-k. No ``RouterReplay``, whose ``__init__`` enters it in the list."""

    def __init__(self, chooser: Chooser) -> None:
        self.chooser = chooser

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        def top_k(scores: Tensor) -> tuple[Tensor, Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        return self.chooser.choose(scores, top_k)


def attach(router: Any, chooser: Chooser) -> None:
    """From now on `chooser` chooses for `router`."""
    if not hasattr(router, "router_replay"):
        megatron_011.let_it_ask(router)
    router.router_replay = _Replay(chooser)


def attached(router: Any) -> Chooser | None:
    """Who chooses for `router`; None: itself."""
    return getattr(getattr(router, "router_replay", None), "chooser", None)


def routers(chunk: Any) -> Iterator[tuple[int, Any]]:
    """(global layer number from 1, router) of each MoE layer in the decoder of a live ``GPTModel``.

    Walked, not remembered: layers for multi-token prediction have routers and numbers, too, and so has a second decoder
    of the process.
    """
    for layer in chunk.decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            yield layer.layer_number, router
