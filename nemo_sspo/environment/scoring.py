"""The reward of a batch of responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_sspo.environment.answers import answer_reward
from nemo_sspo.environment.formats import format_reward


@dataclass(frozen=True)
class Reward:
    """One response's reward and its two parts, each with weight 1."""

    answer: float
    format: float

    @property
    def total(self) -> float:
        """answer + format, between 0 and 2."""
        return self.answer + self.format


def score(responses: Sequence[str], golds: Sequence[str]) -> list[Reward]:
    """The rewards of B responses against their B gold answers, in order. ValueError if the lengths differ."""
    if len(responses) != len(golds):
        raise ValueError(f"{len(responses)} responses but {len(golds)} gold answers")
    return [Reward(answer_reward(r, g), format_reward(r)) for r, g in zip(responses, golds, strict=True)]
