"""Reads a run's folder and shows it: figures, a self-contained HTML report, a comparison of several runs."""

from nemo_sspo.report.data import RunData, load_run
from nemo_sspo.report.histogram import LOG_RATIO_BINS, log_ratio_histogram
from nemo_sspo.report.html import write_comparison, write_report

__all__ = ["LOG_RATIO_BINS", "RunData", "load_run", "log_ratio_histogram", "write_comparison", "write_report"]
