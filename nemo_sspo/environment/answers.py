"""Whether a response's answer is the gold answer."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from nemo_sspo.environment import verifier
from nemo_sspo.environment.formats import last_answer
from nemo_sspo.errors import UserError

MAX_CHARACTERS = 1000  # a longer answer is wrong; a longer gold answer is a mistake in the data

_WRAPPERS = [
    re.compile(pattern, re.DOTALL)
    for pattern in (
        r"\$\$(.+)\$\$",
        r"\$(.+)\$",
        r"\\\((.+)\\\)",
        r"\\\[(.+)\\\]",
        r"\\(?:boxed|text|mathrm|textbf)\s*\{(.+)\}",
        r"\(([A-Za-z])\)",  # a choice: (B)
    )
]
_DECIMAL = re.compile(
    r"\\?\$?\s*(?P<sign>[+-]?)\s*\\?\$?\s*"
    r"(?P<number>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?P<power>[eE][+-]?[0-9]{1,3})?\s*\\?%?"
)
_RATIO = re.compile(
    r"(?P<sign>[+-]?)\s*(?:(?P<over>[0-9]+)\s*/\s*(?P<under>[0-9]+)"
    r"|\\[dt]?frac\s*\{\s*(?P<latex_over>[+-]?[0-9]+)\s*\}\s*\{\s*(?P<latex_under>[0-9]+)\s*\})"
)
_UNIT = re.compile(r"\s*\\(?:text|mathrm)\s*\{[^{}]*\}$")
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
_NO_ANSWER = {"nan", "null"}  # what tables write where they have nothing
# Where an expression would end and another begin: `math_verify` would take the one it likes.
_DELIMITER = re.compile(r"(?<!\\)\$|\\[][()]")
# Long runs of letters that are no LaTeX command and no function: not a gold answer, but a sentence.
_PROSE = re.compile(r"(?<![\\A-Za-z])(?!(?:sqrt|frac|sinh|cosh|tanh|arcsin|arccos|arctan)\b)[A-Za-z]{4,}")


@dataclass(frozen=True)
class _Number:
    value: Fraction
    is_ratio: bool  # written with a fraction bar


def answer_reward(response: str, gold: str) -> float:
    """1.0 if the last complete ``<answer>...</answer>`` of the response is the gold answer, else 0.0.

    Both are normalised first (white space, ``####``, a trailing period, ``$...$``, ``\\boxed{}``, ``\\text{}``), then
    compared by what the gold answer is:

    - a number (sign, thousands commas, decimals, ``a/b``, ``\\frac{a}{b}``, ``$`` before and ``%`` or
      ``\\text{unit}`` after, which are ignored): exactly, and only with a number. ``785+457`` does not count as 1242,
      nor ``84/2`` as 42: an answer that copies the question is not an answer.
    - one word or letter (a choice, yes, Monday): as text, whatever the case.
    - anything else: as a mathematical expression, by ``math_verify`` in a process of its own under a CPU-time limit.

    Deterministic, and safe in any thread; garbage scores 0.0 and never raises. A gold answer that is none of the three
    is refused where it is loaded, by `parse_gold`.
    """
    block = last_answer(response)
    if block is None or len(block) > MAX_CHARACTERS:
        return 0.0
    answer, gold = _normalise(block), _normalise(gold)
    if not answer or not gold:
        return 0.0
    if answer == gold:
        return 1.0
    wanted = _number(gold)
    if wanted is not None:
        return float(_same_number(wanted, _number(answer)))
    if _WORD.fullmatch(gold):
        return float(answer.casefold() == gold.casefold())
    return float(not _DELIMITER.search(answer) and verifier.equal(gold, answer))


def parse_gold(text: str) -> str:
    """The gold answer in `text`: what follows the last ``####``, without white space around it.

    Raises `UserError` if that is nothing that `answer_reward` can verify (a number, an expression, one word).
    """
    gold = text.rsplit("####", 1)[-1].strip()
    allowed = "allowed: a number, an expression in LaTeX or plain, one word, or reasoning that ends in '#### answer'"
    if not gold:
        raise UserError(f"the answer is empty; {allowed}")
    shown = gold if len(gold) <= 60 else gold[:57] + "..."
    if len(gold) > MAX_CHARACTERS:
        raise UserError(f"the answer {shown!r} has {len(gold)} characters, at most {MAX_CHARACTERS} can be verified")
    plain = _normalise(gold)
    if _number(plain) is not None or (_WORD.fullmatch(plain) and plain.casefold() not in _NO_ANSWER):
        return gold
    prose = _DELIMITER.search(plain) or _PROSE.search(_UNIT.sub("", plain))
    if not plain or _WORD.fullmatch(plain) or prose or not verifier.is_expression(plain):
        raise UserError(f"the answer {shown!r} can't be verified; {allowed}")
    return gold


def _normalise(text: str) -> str:
    text = text.rsplit("####", 1)[-1].replace("\N{MINUS SIGN}", "-")
    before = None
    while before != text:
        before = text
        text = text.strip().rstrip(".")
        for wrapper in _WRAPPERS:
            match = wrapper.fullmatch(text)
            if match and _is_closed(match[1]):
                text = match[1]
    return re.sub(r"\s+", " ", text)


def _is_closed(text: str) -> bool:
    """Whether the braces in what a wrapper held belong together: in ``e}+\\text{x`` they do not."""
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return True


def _number(text: str) -> _Number | None:
    text = _UNIT.sub("", text.replace("{,}", ",").replace(r"\,", "").replace(r"\!", ""))
    if match := _DECIMAL.fullmatch(text):
        digits = match["sign"] + match["number"].replace(",", "") + (match["power"] or "")
        return _Number(Fraction(digits), is_ratio=False)
    match = _RATIO.fullmatch(text)
    if match is None:
        return None
    over, under = int(match["over"] or match["latex_over"]), int(match["under"] or match["latex_under"])
    if under == 0:
        return None
    return _Number(Fraction(-over if match["sign"] == "-" else over, under), is_ratio=True)


def _same_number(wanted: _Number, given: _Number | None) -> bool:
    if given is None or given.value != wanted.value:
        return False
    undivided = given.is_ratio and not wanted.is_ratio and wanted.value.denominator == 1
    return not undivided
