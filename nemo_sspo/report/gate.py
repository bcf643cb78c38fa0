"""What the objective's weight does to the ratios that the run really saw."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes

from nemo_sspo.objective import build_objective
from nemo_sspo.report.data import RunData
from nemo_sspo.report.histogram import LOG_RATIO_BINS
from nemo_sspo.report.style import BLUE, GREY, ORANGE


def total_histogram(run: RunData) -> np.ndarray:
    """Counts [bins + 2] of the whole run: the sum of `log_ratio_histogram` over its optimizer steps."""
    rows = [row for record in run.metrics if (row := record.get("log_ratio/histogram"))]
    matching = [row for row in rows if len(row) == len(LOG_RATIO_BINS) + 1]
    return np.array([np.zeros(len(LOG_RATIO_BINS) + 1), *matching], dtype=np.int64).sum(axis=0)


def weight_curves(run: RunData, log_ratio: np.ndarray) -> dict[str, np.ndarray]:
    """The configured objective's weight at each log-ratio [N], for positive and for negative advantages."""
    options: dict[str, Any] = run.option("model.grpo.objective", {})
    objective = build_objective({k: v for k, v in options.items() if v is not None and k != "advantages"})
    points = torch.as_tensor(log_ratio, dtype=torch.float64)
    signs = (("A > 0", 1), ("A < 0", -1))
    return {label: objective.weight_curve(points, sign=sign).detach().numpy() for label, sign in signs}


def draw_gate_weight(axes: Axes, run: RunData) -> None:
    """Weight of a token's gradient over its log-ratio, with the histogram of the run behind it."""
    edges = np.array(LOG_RATIO_BINS)
    counts = total_histogram(run)
    total = max(counts.sum(), 1)
    seen = np.flatnonzero(counts[1:-1])
    reach = max(0.5, np.abs(edges[[seen[0], seen[-1] + 1]]).max()) if len(seen) else 1.0

    behind = axes.twinx()
    behind.stairs(counts[1:-1] / total, edges, fill=True, color=GREY, alpha=0.35)
    behind.set_yscale("log")
    behind.set_ylim(bottom=0.5 / total)
    behind.set_ylabel("Share of the run's tokens")
    behind.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    behind.grid(False)
    axes.set_zorder(behind.get_zorder() + 1)
    axes.patch.set_visible(False)

    log_ratio = np.linspace(-reach, reach, 401)
    for (label, curve), colour, style in zip(
        weight_curves(run, log_ratio).items(), (BLUE, ORANGE), ("-", "--"), strict=True
    ):
        axes.plot(log_ratio, curve, style, color=colour, label=f"weight, {label}")
    axes.set_xlim(-reach, reach)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("log-ratio of a token, log new − log old probability [nat]")
    axes.set_ylabel("Weight of the token's gradient")
    axes.legend(loc="upper left")
    if outside := counts[0] + counts[-1]:
        text = f"{100 * outside / total:.2g} % of tokens lie\nbeyond ±{edges[-1]:.0f}"
        axes.text(0.98, 0.97, text, transform=axes.transAxes, ha="right", va="top", fontsize=9)
