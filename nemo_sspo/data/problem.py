"""A problem: what is asked and its gold answer."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Problem:
    """One problem, as text.

    `response` is a worked ``<think>...</think><answer>...</answer>`` for the cold start, where there is one; `source`
    says where the problem comes from (``file:line``), for error messages.
    """

    question: str
    answer: str
    response: str | None = None
    source: str = field(default="", compare=False)
