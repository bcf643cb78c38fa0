"""Telling the user something, once for all ranks."""

from __future__ import annotations

import sys

from nemo_sspo.parallel.ranks import rank


def note(message: str) -> None:
    """One line on standard error, from rank 0."""
    if rank() == 0:
        print(f"Note: {message}", file=sys.stderr, flush=True)
