"""What the trainer asks of a generation engine, whichever it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt.

    `temperature` 0 is greedy. A response ends after `stop_id` (which it includes) or after `max_tokens`. The ids in
    `forbidden_ids` (padding: no response contains it) are never chosen; the others keep their proportions. With
    `return_routes` the experts that each token went to are wanted.
    """

    max_tokens: int
    temperature: float
    stop_id: int
    forbidden_ids: tuple[int, ...] = ()
    return_routes: bool = False


@dataclass(frozen=True)
class GenerationOutput:
    """One response: its tokens, the engine's log-probability of each at the sampling temperature, how it ended.

    `routes` is ``[n, L, K]``, whole numbers: the experts of the first n tokens of prompt and response, by MoE layer in
    the order of the model, where they were asked for. n is mostly one less than there are tokens, for the last one is
    chosen and not read. A token that an engine can't tell of (its prefix was cached, say) has -1 for all K.
    """

    token_ids: list[int]
    logprobs: list[float]
    finished: bool  # ended with stop_id; False: cut at max_tokens
    routes: Tensor | None = None


class GenerationEngine(Protocol):
    """Continues prompts with the weights that it was last given."""

    @property
    def returns_routes(self) -> bool:
        """Whether it can say which experts it chose (`SamplingParams.return_routes`)."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: SamplingParams, seeds: Sequence[int]
    ) -> list[GenerationOutput]:
        """One response a prompt. A response depends on its prompt and its seed, not on what it is batched with."""
        ...

    def refit(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the policy's current weights. An engine that shares them with the trainer has nothing to do."""
        ...
