"""How far the live routers have moved from the replayed routes, by layer and over time."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nemo_sspo.report.data import RunData
from nemo_sspo.report.style import BLUE, ORANGE, finish

_FEW = 30  # rollouts whose points are marked; one rollout has no line to see, and on many markers are clutter
_LEAST = 0.01  # height of a scale on which everything is at its lower end, as with one optimizer step a rollout


def last_steps(run: RunData) -> np.ndarray:
    """Positions in `run.metrics` of the last optimizer step on each rollout, in order.

    Mismatch begins each rollout at 0 and grows: a rollout in progress, with fewer steps so far than the one before it,
    would look like a drop and is left out.
    """
    rollouts = [record["rollout"] for record in run.metrics]
    _, first, counts = np.unique(rollouts, return_index=True, return_counts=True)
    in_progress = len(counts) > 1 and counts[-1] < counts[-2]
    return (first + counts - 1)[: len(counts) - in_progress]


def mismatch_by_layer(run: RunData) -> np.ndarray:
    """Mismatch [optimizer steps, L] of each MoE layer; NaN where it is null or missing."""
    rows = [record.get("routing/mismatch_by_layer") or [] for record in run.metrics]
    table = np.full((len(rows), max(map(len, rows), default=0)), np.nan)
    for line, row in zip(table, rows, strict=True):
        line[: len(row)] = np.array(row, dtype=float)  # None becomes NaN
    return table


def draw_routing_mismatch(axes: Axes, run: RunData) -> None:
    """Mean and range over layers at the last optimizer step on each rollout; the rollout's load imbalance, right."""
    last = last_steps(run)
    steps, mean, layers = run.column("metrics", "step")[last], _last(run, "mismatch_rate"), mismatch_by_layer(run)[last]
    style = {"marker": "o" if len(last) <= _FEW else "", "markersize": 3.5}
    if layers.size:
        low, high = np.fmin.reduce(layers, axis=1), np.fmax.reduce(layers, axis=1)
        edge = 1 if len(last) > 1 else 6  # a single rollout's band has no width: its edge is what shows
        axes.fill_between(steps, low, high, color=BLUE, alpha=0.25, linewidth=edge, label="lowest to highest layer")
    axes.plot(steps, mean, color=BLUE, label="mean of layers", **style)
    axes.set_xlim(left=run.metrics[0]["step"] - 0.5)  # where the first rollout's steps begin, as in the heat map
    _leave_room(axes, 0, np.append(layers, mean))
    axes.yaxis.set_major_formatter(_percent)
    if run.has("metrics", "routing/load_imbalance"):
        style |= {"color": ORANGE, "linestyle": "--"}
        axes.plot([], [], label="load imbalance (right)", **style)
        right, imbalance = axes.twinx(), _last(run, "load_imbalance")
        right.plot(steps, imbalance, **style)
        _leave_room(right, 1, imbalance)  # 1 is an even load
        right.set_ylabel("Busiest expert over mean load")
        right.grid(False)
    finish(axes, "Optimizer step", "Share of replayed experts", legend="upper right")


def draw_routing_layers(axes: Axes, run: RunData) -> None:
    """Heat map: a row for each MoE layer, upwards; a column for each rollout, as wide as it has optimizer steps.

    It is coloured by its last step. A column for each step would have a dark stripe in every rollout, where mismatch is
    0, and once there are more steps than pixels the stripes would beat into a pattern that the run does not have.
    """
    last, steps = last_steps(run), run.column("metrics", "step")
    layers = mismatch_by_layer(run)[last]
    step_edges = np.append(steps[0] - 0.5, steps[last] + 0.5)
    layer_edges = np.arange(layers.shape[1] + 1) + 0.5
    largest = np.fmax.reduce(layers, axis=None, initial=0)
    mesh = axes.pcolormesh(step_edges, layer_edges, layers.T, cmap="viridis", vmin=0, vmax=largest or _LEAST)
    finish(axes, "Optimizer step", "MoE layer")
    axes.yaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
    axes.grid(False)
    axes.figure.colorbar(mesh, ax=axes, label="Share of replayed experts", format=FuncFormatter(_percent))


def _last(run: RunData, key: str) -> np.ndarray:
    return run.column("metrics", f"routing/{key}")[last_steps(run)]


def _leave_room(axes: Axes, low: float, values: np.ndarray) -> None:
    """Begin the y axis at `low` and end it above `values`, so that the legend has room over two axes' lines."""
    height = np.fmax.reduce(values, axis=None, initial=low) - low
    axes.set_ylim(low, low + 1.35 * (height or _LEAST))


def _percent(share: float, _: float) -> str:
    return f"{100 * share:g} %"
