"""Options of objectives: their defaults, what is allowed, and the messages for what is not."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_sspo.errors import UserError

PREFIX = "model.grpo.objective"


def key(name: str) -> str:
    """The dotted key of an option, as users write it."""
    return f"{PREFIX}.{name}"


def did_you_mean(given: object, allowed: Iterable[str]) -> str:
    """' Did you mean ...?' with the nearest allowed name, or nothing."""
    close = difflib.get_close_matches(str(given), list(allowed), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def not_one_of(given: object, allowed: Iterable[str]) -> str:
    """The message for a name that is not one of the allowed."""
    names = list(allowed)
    return f"unknown {given!r}; allowed: {', '.join(names)}.{did_you_mean(given, names)}"


@dataclass(frozen=True)
class Option:
    """One option: its default and what is allowed.

    default: the value when the option is absent or null; None means "off".
    allowed: "positive" | "non_negative" | "bool" | "gate" (any name; `find_gate` checks it), or a tuple of names.
    help: one line, units included.
    """

    default: Any
    allowed: str | tuple[str, ...]
    help: str

    def check(self, name: str, value: Any) -> Any:
        """The value, as float where it is a number. Raises UserError naming the key, the value and what is allowed."""
        if isinstance(self.allowed, tuple):
            if value not in self.allowed:
                raise UserError(f"{key(name)}: {not_one_of(value, self.allowed)}")
            return value
        if self.allowed == "gate":
            return value
        if self.allowed == "bool":
            if not isinstance(value, bool):
                raise UserError(f"{key(name)}: {value!r} given; allowed: true or false.")
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not number or value < 0 or (self.allowed == "positive" and value == 0):
            at = "above 0" if self.allowed == "positive" else "at least 0"
            raise UserError(f"{key(name)}: {value!r} given; allowed: a finite number {at}.")
        return float(value)


def resolve(
    objective: str, given: Mapping[str, Any], options: Mapping[str, Option], known: Iterable[str]
) -> dict[str, Any]:
    """Every option of an objective, given or default.

    given: what the user wrote, without the name; None means "not given" and is allowed for options of other objectives
    as well, since a configuration file carries all keys.
    known: the options of all objectives, to tell a typo from an option that belongs elsewhere.
    """
    known = set(known)
    for name, value in given.items():
        if name not in known:
            raise UserError(
                f"{key(name)}: unknown option; {objective} takes {', '.join(options)}.{did_you_mean(name, options)}"
            )
        if name not in options and value is not None:
            raise UserError(f"{key(name)}: {objective} has no such option; it takes {', '.join(options)}. Remove it.")
    return {
        name: option.default if given.get(name) is None else option.check(name, given[name])
        for name, option in options.items()
    }
