"""How well a response keeps to ``<think>...</think><answer>...</answer>``."""

from __future__ import annotations

import re

# A block holds no tag of its own kind: in "<think>a<think>b</think>" the block is "b".
_THINK = r"<think>((?:(?!</?think>).)*)</think>"
_ANSWER = r"<answer>((?:(?!</?answer>).)*)</answer>"
_EXACT = re.compile(rf"\s*{_THINK}\s*{_ANSWER}\s*", re.DOTALL)
_THINK_BLOCK = re.compile(_THINK, re.DOTALL)
_ANSWER_BLOCK = re.compile(_ANSWER, re.DOTALL)
_TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def format_reward(response: str) -> float:
    """Grade the format of one response: 1.0, 0.5, 0.25 or 0.0.

    ===== =====================================================================================
    1.0   one think block, then one answer block, and nothing else but white space around them
    0.5   a complete think block and, after it, a complete answer block, with other text or more
          tags before, between or after them
    0.25  at least one complete block of either kind, but not both in that order
    0.0   no complete block
    ===== =====================================================================================

    Only the structure counts: a block may be empty. The four grades are those of the SSPO paper's set-up
    (arXiv 2602.19327); what earns the two in the middle is this project's choice.
    """
    if _EXACT.fullmatch(response) and all(response.count(tag) == 1 for tag in _TAGS):
        return 1.0
    think = _THINK_BLOCK.search(response)
    if think and _ANSWER_BLOCK.search(response, think.end()):
        return 0.5
    return 0.25 if think or _ANSWER_BLOCK.search(response) else 0.0


def uses_think_block(response: str) -> bool:
    """Whether the response's first complete think block says anything (white space alone does not count)."""
    block = _THINK_BLOCK.search(response)
    return block is not None and bool(block[1].strip())


def last_answer(response: str) -> str | None:
    """The text of the last complete answer block, or None where there is none."""
    blocks = _ANSWER_BLOCK.findall(response)
    return blocks[-1] if blocks else None
