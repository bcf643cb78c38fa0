"""Numbers, times and nested values as text for a reader."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def number(value: Any) -> str:
    """A number with as many digits as a reader needs, a dash where there is none; text stays as it is."""
    if value is None:
        return "–"
    if isinstance(value, float):
        size = abs(value)
        return f"{value:.3g}" if 0 < size < 0.01 else f"{value:.3f}" if size < 10 else f"{value:,.1f}"
    return str(value)


def points(value: float | None) -> str:
    """A difference with its sign."""
    return "–" if value is None else f"{value:+.3f}".replace("-", "−")


def seconds(value: float) -> str:
    """A duration, such as ``4 min 05 s``."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def flatten(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Dotted keys with their values, nulls left out."""
    rows = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            rows += flatten(value, f"{prefix}{key}.")
        elif value is not None:
            words = isinstance(value, list) and all(isinstance(item, str) for item in value)
            rows.append((f"{prefix}{key}", " ".join(value) if words else str(value)))
    return rows
