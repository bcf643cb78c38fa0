"""Problems from JSONL files."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from nemo_sspo.data.problem import Problem
from nemo_sspo.environment import parse_gold
from nemo_sspo.errors import UserError

_CALCULATOR = re.compile(r"<<[^<>]*>>")


def load_jsonl(path: str | Path) -> list[Problem]:
    """The problems of a file with one ``{"question": ..., "answer": ...}`` a line; blank lines are skipped.

    An answer in GSM8K's form, ``reasoning #### 42``, gives the gold answer 42 and the worked response
    ``<think>reasoning</think><answer>42</answer>``, without the calculator's ``<<48/2=24>>``. A ``"response"`` beside
    it is taken as the worked response as it is. Other keys are ignored.

    UserError, naming file and line, for a file that is missing or empty, a line that is no JSON object in UTF-8, a key
    that is missing or no text (an answer may be a number) and an answer that can't be verified.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    except OSError as error:
        raise UserError(
            f"{path}: the data file can't be read ({error.strerror}); give the path of a JSONL file"
        ) from None
    problems = [_parse_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not problems:
        raise UserError(f'{path}: the data file is empty; it needs lines such as {{"question": "2+3=", "answer": "5"}}')
    return problems


def _parse_line(line: bytes, source: str) -> Problem:
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{source}: not UTF-8 at byte {error.start}; save the file as UTF-8") from None
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise UserError(
            f"{source}: not JSON ({reason}); each line must be one object with question and answer"
        ) from None
    if not isinstance(row, dict):
        raise UserError(f"{source}: {type(row).__name__} instead of an object with question and answer")
    question = _text(row, "question", source)
    answer = _text(row, "answer", source, numbers=True)
    try:
        gold = parse_gold(answer)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    response = _text(row, "response", source) if row.get("response") is not None else _worked(answer, gold)
    return Problem(question, gold, response, source)


def _text(row: dict, key: str, source: str, numbers: bool = False) -> str:
    if key not in row:
        raise UserError(f"{source}: no key {key!r}, only {', '.join(map(repr, row)) or 'none at all'}; add it")
    value = row[key]
    is_number = type(value) is int or (isinstance(value, float) and math.isfinite(value))  # True is an int, too
    if numbers and is_number:
        return str(value)
    if not isinstance(value, str):
        allowed = "a text or a number" if numbers else "a text"
        raise UserError(f"{source}: {key} is {json.dumps(value)[:60]}; it must be {allowed}")
    if not value.strip():
        raise UserError(f"{source}: {key} is empty; fill it in or delete the line")
    return value


def _worked(answer: str, gold: str) -> str | None:
    reasoning = _CALCULATOR.sub("", answer.rsplit("####", 1)[0]).strip() if "####" in answer else ""
    return f"<think>{reasoning}</think><answer>{gold}</answer>" if reasoning else None
