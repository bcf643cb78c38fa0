"""The exceptions that a user is told of in one line."""

from __future__ import annotations

from collections.abc import Sequence


class UserError(ValueError):
    """A mistake in what the user gave: a key, a file, a value.

    The message is one line that names the dotted key or the file and line, what was given, what is
    allowed and what to do. The command line prints it without a traceback and exits with `status`.
    """

    status = 2


def some(names: Sequence[str]) -> str:
    """The first few names and how many more there are, with their verb: ``a is``, ``a, b, c and 5 more are``."""
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"{', '.join(names[:3])}{more} {'is' if len(names) == 1 else 'are'}"


class RunError(UserError):
    """What a run can't get over by itself, such as a full disk: told like a mistake, but the exit status is 1."""

    status = 1
