"""JSON and JSON Lines as a run's folder holds them: strict to write, forgiving only of a half-written last line."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nemo_sspo.errors import UserError


def plain(value: Any) -> Any:
    """`value` with tensors, arrays and their scalars turned into Python's types, and NaN and infinities into None.

    JSON has no NaN: ``null`` says "was computed and is no number", which every reader understands.
    """
    if isinstance(value, str | bool | int) or value is None:
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if hasattr(value, "tolist"):  # torch.Tensor, numpy.ndarray and numpy's scalars
        return plain(value.tolist())
    return str(value)  # paths, enums, torch dtypes


def dump_line(record: Mapping[str, Any]) -> str:
    """`record` as one line of JSON, the newline included."""
    return json.dumps(plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def write_text(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` so that a reader sees the old file or the new one, never a part: a temporary file, then a rename."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return path


def write_json(path: str | os.PathLike[str], record: Mapping[str, Any]) -> Path:
    """Write `record` as indented JSON, atomically; values as `plain` converts them."""
    return write_text(path, json.dumps(plain(record), ensure_ascii=False, allow_nan=False, indent=2) + "\n")


def read_lines(path: str | os.PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """The lines of a JSON Lines file, each with its record; none where the file does not exist.

    A last line without a newline is what a killed process leaves behind: it is left out, silently.

    Raises:
        UserError: any other line that is no JSON object, with the file and the line's number.
    """
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError:
        return []
    pairs = []
    for number, encoded in enumerate(raw.split(b"\n")[:-1], start=1):  # what follows the last newline is a half line
        if not encoded.strip():
            continue
        try:
            line = encoded.decode("utf-8")
            record = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}:{number}: not JSON ({error}); delete that line or the file") from None
        if not isinstance(record, dict):
            raise UserError(f"{path}:{number}: got {line[:40]!r}, expected a JSON object; delete that line or the file")
        pairs.append((line + "\n", record))
    return pairs
