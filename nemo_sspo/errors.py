"""The one exception type for mistakes that a user can make and mend."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave: a key, a file, a value.

    The message is one line that names the dotted key or the file and line, what was given, what is
    allowed and what to do. The command line prints it without a traceback and exits with status 2.
    """
