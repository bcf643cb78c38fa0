"""Transformer Engine that is installed and can't be imported.

What: it is hidden (``sys.modules["transformer_engine"] = None``), and why is kept in `BROKEN`.
Versions: megatron-core 0.16.1.
Why: Megatron-Core imports it with its first module and is ready for its absence only, a ModuleNotFoundError. A library
that does not fit, the usual fault, raises others, and not even a model of local layers could be built.
When it can go: when Megatron-Core imports it where it is used.
"""

from __future__ import annotations

import importlib
import sys


def hide_if_broken() -> str | None:
    """Import it; if it is installed and raises, hide it and say what it raised."""
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:  # its libraries raise as they like
        if isinstance(error, ModuleNotFoundError) and error.name == "transformer_engine":
            return None
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]  (Python's mark of what can't be imported)
        return f"{type(error).__name__}: {error}"
    return None


BROKEN = hide_if_broken()
