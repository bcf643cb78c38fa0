"""The figures of one run. Each `draw_*` puts what a run has recorded on the axes that it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nemo_sspo.report.data import RunData
from nemo_sspo.report.gate import draw_gate_weight
from nemo_sspo.report.routing import draw_routing_layers, draw_routing_mismatch
from nemo_sspo.report.style import BLUE, GREEN, GREY, ORANGE, PURPLE, RED, finish, log_scale, new_figure

QUANTILES = ("p01", "p10", "p50", "p90", "p99")


@dataclass(frozen=True)
class Plot:
    """A figure: its title, what it needs to be drawn (a table and a key with values), and how."""

    title: str
    needs: tuple[str, str]
    draw: Callable[[Axes, RunData], None]
    note: str = ""


def smooth(values: np.ndarray, window: int) -> np.ndarray:
    """Centred running mean over `window` values [n] -> [n]; shorter at the ends; NaN counts as missing."""
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    index = np.arange(len(values))
    low, high = np.maximum(index - window // 2, 0), np.minimum(index + window // 2 + 1, len(values))
    count = counts[high] - counts[low]
    return np.divide(sums[high] - sums[low], count, out=np.full(len(values), np.nan), where=count > 0)


def draw_reward(axes: Axes, run: RunData) -> None:
    """Mean reward over rollouts: in all, for the answer, for the format."""
    parts = (("reward/mean", "total", BLUE), ("reward/answer", "answer", GREEN), ("reward/format", "format", ORANGE))
    for key, label, colour in parts:
        if run.has("metrics", key):
            rollouts, values = run.by_rollout(key)
            axes.plot(rollouts, values, color=colour, alpha=0.3, linewidth=1)
            axes.plot(rollouts, smooth(values, len(values) // 12), color=colour, label=label)
    finish(axes, "Rollout", "Mean reward of a response")


def draw_pass_at_1(axes: Axes, run: RunData) -> None:
    """Accuracy on held-out problems over rollouts, greedy and sampled; the test split as single points."""
    for key, name, colour in (("pass_at_1", "greedy", BLUE), ("sampled_accuracy", "sampled", ORANGE)):
        for split, style in (("validation", {"marker": "o", "markersize": 3.5}), ("test", _TEST_POINTS)):
            values = run.column("validation", key, split)
            if np.isfinite(values).any():
                rollouts = run.column("validation", "rollout", split)
                axes.plot(rollouts, values, color=colour, label=f"{name}, {split}", **style)
    axes.set_ylim(-0.02, 1.02)
    finish(axes, "Rollout", "Share of problems solved")


def draw_entropy(axes: Axes, run: RunData) -> None:
    """Mean entropy of the policy's next-token distribution over optimizer steps."""
    axes.plot(run.column("metrics", "step"), run.column("metrics", "entropy/mean"), color=BLUE)
    axes.set_ylim(bottom=0)
    finish(axes, "Optimizer step", "Entropy of a token [nat]")


def draw_response_length(axes: Axes, run: RunData) -> None:
    """Mean and longest response of each rollout."""
    for key, label, colour in (("response_length/mean", "mean", BLUE), ("response_length/max", "longest", GREY)):
        if run.has("metrics", key):
            axes.plot(*run.by_rollout(key), color=colour, label=label)
    axes.set_ylim(bottom=0)
    finish(axes, "Rollout", "Response length [tokens]")


def draw_ratio(axes: Axes, run: RunData) -> None:
    """Quantiles of the token's importance ratio at the last optimizer step on each rollout, and the rollout's maximum.

    The first optimizer step on a rollout has every ratio at 1: drawn step by step, the bands would only flicker.
    """
    _, steps = run.by_rollout("step")
    rollouts, largest = run.by_rollout("ratio/max", np.fmax)
    if run.has("metrics", "log_ratio/quantiles"):
        rows = {record["rollout"]: record.get("log_ratio/quantiles") for record in run.metrics}
        quantiles = [[np.nan if x is None else x for x in rows[r] or [None] * len(QUANTILES)] for r in rollouts]
        low, lower, middle, upper, high = np.exp(np.array(quantiles, dtype=float)).T
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.22, linewidth=0, label="1 % to 99 % of tokens")
        axes.fill_between(steps, lower, upper, color=BLUE, alpha=0.45, linewidth=0, label="10 % to 90 %")
        axes.plot(steps, middle, color=BLUE, linewidth=1.2, label="median")
    axes.plot(steps, largest, color=RED, linewidth=1.2, label="largest")
    log_scale(axes)
    finish(axes, "Optimizer step", "Ratio of new to old probability")


def draw_gradient(axes: Axes, run: RunData) -> None:
    """Gradient norm before clipping, and the learning rate on the right, over optimizer steps."""
    steps, norms = run.column("metrics", "step"), run.column("metrics", "grad_norm")
    axes.plot(steps, norms, color=BLUE, alpha=0.3, linewidth=1)
    axes.plot(steps, smooth(norms, len(norms) // 25), color=BLUE, label="gradient norm")
    axes.set_ylim(bottom=0)
    if run.has("metrics", "lr"):
        axes.plot([], [], color=ORANGE, linestyle="--", label="learning rate (right)")
        right = axes.twinx()
        right.plot(steps, run.column("metrics", "lr"), color=ORANGE, linestyle="--")
        right.set_ylabel("Learning rate")
        right.set_ylim(bottom=0)
        right.grid(False)
        right.ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
    finish(axes, "Optimizer step", "Gradient norm", legend="lower left")


def draw_cold_start(axes: Axes, run: RunData) -> None:
    """Cross-entropy of the supervised stage over its optimizer steps."""
    axes.plot(run.column("cold_start", "step"), run.column("cold_start", "loss/mean"), color=BLUE)
    log_scale(axes)
    finish(axes, "Optimizer step of the cold start", "Cross-entropy of a token [nat]")


def draw_think(axes: Axes, run: RunData) -> None:
    """How often the think block is used, and greedy pass@1 of the responses with and without it, on validation."""
    rollouts = run.column("validation", "rollout", "validation")
    lines = (
        ("think_fraction", "uses the think block", GREY, "-"),
        ("pass_at_1_with_think", "pass@1 with it", GREEN, "-"),
        ("pass_at_1_without_think", "pass@1 without it", PURPLE, "--"),
    )
    for key, label, colour, style in lines:
        if run.has("validation", key):
            values = run.column("validation", key, "validation")
            axes.plot(rollouts, values, style, color=colour, marker="o", markersize=3.5, label=label)
    axes.set_ylim(-0.02, 1.02)
    finish(axes, "Rollout", "Share of responses")


_TEST_POINTS = {"linestyle": "none", "marker": "D", "markersize": 7, "markerfacecolor": "none", "markeredgewidth": 1.6}

PLOTS: dict[str, Plot] = {
    "pass_at_1": Plot("Accuracy on held-out problems", ("validation", "pass_at_1"), draw_pass_at_1),
    "reward": Plot("Training reward", ("metrics", "reward/mean"), draw_reward,
                   "Faint: each rollout. Bold: running mean."),
    "think": Plot(
        "Think block: use and accuracy", ("validation", "think_fraction"), draw_think,
        "Greedy responses to the validation problems: how much of the lift is learning to use the think block.",
    ),
    "ratio": Plot("Importance ratios of tokens", ("metrics", "ratio/max"), draw_ratio,
                  "Bands: the last optimizer step on each rollout, furthest from the policy that sampled it."),
    "gate_weight": Plot(
        "Gradient weight of a token over its log-ratio", ("metrics", "log_ratio/histogram"), draw_gate_weight,
        "Grey: the share of all response tokens of the run that fell into each bin (right, logarithmic).",
    ),
    "routing_mismatch": Plot(
        "Routing mismatch", ("metrics", "routing/mismatch_rate"), draw_routing_mismatch,
        "Replayed experts that the live router would not have chosen, at the last optimizer step on each rollout.",
    ),
    "routing_layers": Plot(
        "Routing mismatch by layer", ("metrics", "routing/mismatch_by_layer"), draw_routing_layers,
        "Colour: the last optimizer step on each rollout. Layers count from the input.",
    ),
    "entropy": Plot("Policy entropy", ("metrics", "entropy/mean"), draw_entropy),
    "response_length": Plot("Response length", ("metrics", "response_length/mean"), draw_response_length),
    "gradient": Plot("Gradient norm and learning rate", ("metrics", "grad_norm"), draw_gradient),
    "cold_start": Plot("Cold start: supervised loss", ("cold_start", "loss/mean"), draw_cold_start),
}  # fmt: skip


def available(run: RunData) -> list[str]:
    """The names in `PLOTS` that this run has recorded anything for."""
    return [name for name, plot in PLOTS.items() if run.has(*plot.needs)]


def figure(run: RunData, name: str) -> Figure:
    """The figure `name` of `PLOTS` for a run; draw it within `style.theme`."""
    result = new_figure()
    _draw(result.add_subplot(), run, name)
    return result


def overview(run: RunData) -> Figure:
    """The run in one picture: up to four of its figures."""
    names = [name for name in ("pass_at_1", "reward", "ratio", "gate_weight") if name in available(run)]
    rows = (len(names) + 1) // 2
    result = new_figure(columns=2, rows=rows)
    for position, name in enumerate(names, start=1):
        _draw(result.add_subplot(rows, 2, position), run, name)
    return result


def _draw(axes: Axes, run: RunData, name: str) -> None:
    PLOTS[name].draw(axes, run)
    axes.set_title(PLOTS[name].title)
