"""What one router does in a pass: choose by itself, choose and be recorded, or take the experts that it is given."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

# top-k of scores [n, E] as the router would do it: values and ids, [n, K] each
TopK = Callable[[Tensor], tuple[Tensor, Tensor]]


class Action(Enum):
    """What the routers do in the present pass."""

    NONE = "none"
    RECORD = "record"
    REPLAY = "replay"


class Target(NamedTuple):
    """What one micro-batch's tokens are given, in this router's order of them."""

    ids: Tensor  # [n, K] storage type
    routed: Tensor  # [n] bool: whether there is a route; the router chooses for the others
    counted: Tensor  # [n] bool: those of them that the statistics count


class RouterHook:
    """Stands at the top-k of one router, in place of Megatron-Core's ``RouterReplay`` object.

    Activation recompute calls a router twice for a micro-batch: first without gradients, within the checkpointed
    forward pass, then with them, when backward comes to it. Both get the same experts: first calls queue what they were
    given, and backward takes the micro-batches of a model chunk in the order of their forward passes, under every one
    of Megatron-Core's schedules.
    """

    def __init__(self, layer: int, place: int) -> None:
        self.layer = layer  # its global number
        self.place = place  # its index among the MoE layers
        self.begin(Action.NONE)

    def begin(self, action: Action, training: bool = False) -> None:
        """Start a pass; `training` says that backward will follow."""
        self.action, self._training = action, training
        self.target: Target | None = None
        self.calls = 0
        self.recorded: list[Tensor] = []
        self.replayed: Tensor | int = 0  # tokens that took the experts they were given
        self.differing: Tensor | int = 0  # (token, expert) given, but not among the router's own choice
        self._again: deque[Target] = deque()

    @property
    def unfinished(self) -> bool:
        """Whether backward has yet to come back for a micro-batch."""
        return bool(self._again)

    def choose(self, scores: Tensor, top_k: TopK) -> tuple[Tensor, Tensor]:
        """Values and ids ``[n, K]`` for scores ``[n, E]``; values are differentiable in the scores."""
        if self.action is Action.NONE:
            return top_k(scores)
        if self.action is Action.RECORD:
            values, ids = top_k(scores)
            self.calls += 1
            self.recorded.append(ids)
            return values, ids
        again = torch.is_grad_enabled() and bool(self._again)
        if again:
            target = self._again.popleft()
        else:
            target, self.target = self.target, None  # good for one forward pass
        if target is None or len(target.ids) != len(scores):
            given = "none" if target is None else str(len(target.ids))
            raise RuntimeError(f"router of layer {self.layer}: got {len(scores)} tokens, but routes for {given}")
        with torch.no_grad():
            own = top_k(scores.detach())[1]
            ids = torch.where(target.routed[:, None], target.ids.long(), own)
            if not again:
                self._count(target.counted, ids, own, scores.shape[1])
        if not again and self._training and not torch.is_grad_enabled():
            self._again.append(target)
        return scores.gather(1, ids), ids

    def _count(self, counted: Tensor, ids: Tensor, own: Tensor, experts: int) -> None:
        self.calls += 1
        chosen = torch.zeros(len(ids), experts, dtype=torch.bool, device=ids.device).scatter_(1, own, True)
        self.replayed = self.replayed + counted.sum()
        self.differing = self.differing + (~chosen.gather(1, ids) & counted[:, None]).sum()
