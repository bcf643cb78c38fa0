"""Routers of Megatron-Core 0.11 that ask a chooser for their experts, as those of 0.16 ask their ``router_replay``.

What: one router gets a class of its own, whose ``routing`` asks. While that method runs, and no longer, two names in
Megatron-Core's `moe_utils.py` are others: ``torch``, to a proxy whose ``topk`` asks, and ``group_limited_topk``. Other
routers have their own class still and find both names as ever, also while the chooser is at work.
Versions: megatron-core 0.11, which NeMo 2.2 needs.
Why: its top-k is a function within ``topk_softmax_with_capacity``, and no argument leads there. A copy of what lies
around it (score functions, auxiliary losses, dropping) would be ours to keep equal.
When it can go: with the support of NeMo 2.2.
"""

from __future__ import annotations

from nemo_sspo.compat.megatron_cpu import Proxy  # isort: skip  (before Megatron-Core is imported)

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.core.transformer.moe import moe_utils
from torch import Tensor


def let_it_ask(router: Any) -> None:
    """From now on ``router.router_replay.chooser`` is asked in every ``router.routing``, once."""
    router.__class__ = _asking(type(router))


@functools.cache
def _asking(router_class: Any) -> Any:
    class AskingRouter(router_class):
        def routing(self, logits: Tensor) -> Any:
            with _asked(self.router_replay.chooser.choose):
                return super().routing(logits)

    return AskingRouter


@contextmanager
def _asked(choose: Any) -> Iterator[None]:
    """`choose` is asked for the experts of each token, and for nothing else that is a top-k."""
    torch, groups = moe_utils.torch, moe_utils.group_limited_topk

    def ask(scores: Tensor, top_k: Any) -> tuple[Tensor, Tensor]:
        with _names(torch, groups):
            return choose(scores, top_k)

    def topk(input: Tensor, k: int, dim: int = -1, **options: Any) -> Any:
        if dim != 1:  # over tokens: which of them an expert drops
            return torch.topk(input, k, dim=dim, **options)
        return ask(input, lambda scores: torch.topk(scores, k, dim=dim, **options))

    # It hides the experts of all other groups behind -inf before its last top-k, so that is too late to ask: a given
    # expert of such a group must have its score.
    def group_limited_topk(scores: Tensor, **sizes: Any) -> tuple[Tensor, Tensor]:
        return ask(scores, lambda scores: groups(scores=scores, **sizes))

    with _names(Proxy(torch, topk=topk), group_limited_topk):
        yield


@contextmanager
def _names(torch: Any, group_limited_topk: Any) -> Iterator[None]:
    """What `moe_utils.py` sees under these names."""
    before = moe_utils.torch, moe_utils.group_limited_topk
    moe_utils.torch, moe_utils.group_limited_topk = torch, group_limited_topk
    try:
        yield
    finally:
        moe_utils.torch, moe_utils.group_limited_topk = before
