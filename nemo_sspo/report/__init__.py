"""Reads a run's folder and shows it: figures, a self-contained HTML report, a comparison of several runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from nemo_sspo.report.data import RunData, load_run
from nemo_sspo.report.histogram import LOG_RATIO_BINS, log_ratio_histogram

if TYPE_CHECKING:
    from nemo_sspo.report.html import write_comparison, write_report

__all__ = ["LOG_RATIO_BINS", "RunData", "load_run", "log_ratio_histogram", "write_comparison", "write_report"]


def __getattr__(name: str) -> Any:
    """What draws, when it is asked for: Matplotlib takes a second to import, on every rank that only trains."""
    if name not in ("write_comparison", "write_report"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from nemo_sspo.report import html

    return getattr(html, name)
