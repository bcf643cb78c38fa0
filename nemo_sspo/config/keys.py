"""Every dotted key of the schema with its type, for messages that name what is allowed."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from nemo_sspo.config.schema import RunConfig


@cache
def schema_keys() -> dict[str, Any]:
    """Dotted key -> annotated type, for sections (dataclass types) and for values, in the schema's order."""

    def walk(section: type, prefix: str) -> Iterable[tuple[str, Any]]:
        hints = get_type_hints(section)
        for field in fields(section):
            key, kind = prefix + field.name, hints[field.name]
            yield key, kind
            if is_dataclass(kind):
                yield from walk(kind, key + ".")  # type: ignore[arg-type]

    return dict(walk(RunConfig, ""))


def is_section(key: str) -> bool:
    """True where ``key`` names a section of the schema and not a value."""
    return is_dataclass(schema_keys().get(key))


def children(section: str) -> list[str]:
    """Names directly under a section; ``""`` is the root."""
    prefix = section + "." if section else ""
    return [key[len(prefix) :] for key in schema_keys() if key.startswith(prefix) and "." not in key[len(prefix) :]]


def type_name(kind: Any) -> str:
    """A type as a user would say it: ``int``, ``float or null``, ``list of str or null``, ``section``."""
    if get_origin(kind) in (types.UnionType, Union):
        return " or ".join(type_name(member) for member in get_args(kind))
    if kind is types.NoneType:
        return "null"
    if get_origin(kind) is list:
        return f"list of {type_name(get_args(kind)[0])}"
    return "section" if is_dataclass(kind) else kind.__name__


def show(value: Any) -> str:
    """A value as the user wrote it: ``null`` and ``true`` as in YAML, text in quotes."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def suggest(key: str) -> str:
    """What a user who wrote ``key`` probably meant, as the end of a message; empty where nothing comes close."""

    def closeness(candidate: str) -> float:
        whole = difflib.SequenceMatcher(None, key, candidate).ratio()
        last = difflib.SequenceMatcher(None, key.rpartition(".")[2], candidate.rpartition(".")[2]).ratio()
        return (whole + last) / 2

    ranked = sorted(schema_keys(), key=closeness, reverse=True)
    best = closeness(ranked[0])
    if best >= 0.6:
        return f"did you mean {' or '.join(near for near in ranked[:3] if closeness(near) > best - 0.05)}?"
    parent = key.rpartition(".")[0]
    if parent == "" or is_section(parent):
        return f"{parent or 'the top level'} has: {', '.join(children(parent))}"
    return "nemo_sspo/config/schema.py lists all keys"
