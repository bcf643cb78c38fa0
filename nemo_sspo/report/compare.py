"""Several runs side by side: overlaid curves, a table of results, and where their configurations differ."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nemo_sspo.report.data import RunData
from nemo_sspo.report.style import COLOURS, finish, log_scale, new_figure
from nemo_sspo.report.text import flatten, number, points, seconds

# title, table, key, y label
_CURVES = (
    ("Greedy pass@1 on validation", "validation", "pass_at_1", "Share of problems solved"),
    ("Sampled accuracy on validation", "validation", "sampled_accuracy", "Share of responses that are right"),
    ("Training reward", "metrics", "reward/mean", "Mean reward of a response"),
    ("Use of the think block on validation", "validation", "think_fraction", "Share of responses"),
    ("Largest importance ratio", "metrics", "ratio/max", "Ratio of new to old probability"),
    ("Routing mismatch", "metrics", "routing/mismatch_rate", "Share of replayed experts"),
    ("Policy entropy", "metrics", "entropy/mean", "Entropy of a token [nat]"),
    ("Response length", "metrics", "response_length/mean", "Mean length [tokens]"),
    ("Gradient norm", "metrics", "grad_norm", "Gradient norm"),
)
_NOT_COMPARED = ("model.seed", "exp_manager.")


def compare(runs: Sequence[RunData]) -> dict[str, Any]:
    """What the comparison's page shows: names, tables, and ``drawings``, a list of (title, function -> Figure)."""
    names = labels(runs)
    groups = by_configuration(runs)
    drawings: list[tuple[str, Callable[[], Figure]]] = [
        (title, partial(overlay, runs, title, table, key, y_label))
        for title, table, key, y_label in _CURVES
        if any(run.has(table, key) for run in runs)
    ]
    return {
        "names": names,
        "grouped": len(groups) < len(runs),
        "summary": _summary_table(runs, names, groups),
        "differences": _differences(runs, names),
        "drawings": drawings,
    }


def labels(runs: Sequence[RunData]) -> list[str]:
    """The folders' names; where two are the same, paths from the folder that all have in common."""
    names = [run.name for run in runs]
    if len(set(names)) == len(names):
        return names
    common = os.path.commonpath([run.folder.parent for run in runs])
    return [os.path.relpath(run.folder, common) for run in runs]


def by_configuration(runs: Sequence[RunData]) -> list[list[int]]:
    """Positions of the runs, in groups whose configurations differ by ``model.seed`` (and the run's folder) only."""
    groups: dict[str, list[int]] = {}
    for position, run in enumerate(runs):
        options = [pair for pair in flatten(run.config) if not pair[0].startswith(_NOT_COMPARED)]
        groups.setdefault(json.dumps(sorted(options)), []).append(position)
    return list(groups.values())


def curve(run: RunData, table: str, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Rollouts and values of one run; of validation, those on the validation split."""
    if table == "metrics":
        return run.by_rollout(key)
    return run.column(table, "rollout", "validation"), run.column(table, key, "validation")


def median(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The median at each rollout that all of the curves have reached."""
    common = sorted(set.intersection(*(set(rollouts.tolist()) for rollouts, _ in curves)))
    rows = [[dict(zip(x.tolist(), y.tolist(), strict=True))[rollout] for rollout in common] for x, y in curves]
    return np.array(common), np.median(np.array(rows), axis=0)


def overlay(runs: Sequence[RunData], title: str, table: str, key: str, y_label: str) -> Figure:
    """One number of all runs over rollouts; a group of runs that differ by seed only has one colour and a median."""
    figure = new_figure()
    axes = figure.add_subplot()
    names = labels(runs)
    for number_of_group, group in enumerate(by_configuration(runs)):
        if not any(runs[position].has(table, key) for position in group):
            continue  # no line: in the legend it would seem to lie under another one
        colour = COLOURS[number_of_group % len(COLOURS)]
        style = ("-", "--", ":")[number_of_group // len(COLOURS) % 3]
        curves = [curve(runs[position], table, key) for position in group]
        for position, (rollouts, values) in zip(group, curves, strict=True):
            alone = len(group) == 1
            width, alpha, label = (1.5, 1.0, names[position]) if alone else (0.9, 0.4, None)
            axes.plot(rollouts, values, style, color=colour, linewidth=width, alpha=alpha, label=label)
        if len(group) > 1:
            axes.plot(*median(curves), style, color=colour, linewidth=2.2, label=_group_name(names, group))
    if key == "ratio/max":
        log_scale(axes)
    axes.set_title(title)
    finish(axes, "Rollout", y_label)
    return figure


def _group_name(names: Sequence[str], group: Sequence[int]) -> str:
    members = [names[position] for position in group]
    first, last = min(members), max(members)
    shared = next((i for i, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))
    return f"{first[:shared].rstrip('-_./ ') or first}, median of {len(members)} seeds"


def _summary_table(runs: Sequence[RunData], names: Sequence[str], groups: Sequence[Sequence[int]]) -> dict[str, Any]:
    head = ["run", "split", "seed", "rollouts", "pass@1 before", "pass@1 after", "lift", "uses think after", "time"]
    rows = []
    for group in groups:
        results = []
        for position in group:
            run = runs[position]
            outcome = run.outcome
            before, after = outcome.before or {}, outcome.after or {}
            result = [before.get("pass_at_1"), after.get("pass_at_1"), outcome.lift, after.get("think_fraction")]
            results.append(result)
            duration = run.summary.get("seconds")
            rows.append([
                names[position], outcome.split, number(run.option("model.seed")),
                str(run.metrics[-1]["rollout"] if run.metrics else 0), *_result_cells(result),
                "–" if duration is None else seconds(duration),
            ])  # fmt: skip
        splits = {runs[position].outcome.split for position in group}
        if len(group) > 1 and len(splits) == 1:
            columns = [[value for value in column if value is not None] for column in zip(*results, strict=True)]
            medians = [float(np.median(column)) if len(column) == len(group) else None for column in columns]
            rows.append([_group_name(names, group), *splits, "", "", *_result_cells(medians), ""])
    return {"head": head, "rows": rows}


def _result_cells(result: Sequence[float | None]) -> list[str]:
    before, after, lift, think = result
    return [number(before), number(after), points(lift), number(think)]


def _differences(runs: Sequence[RunData], names: Sequence[str]) -> dict[str, Any]:
    options = [dict(flatten(run.config)) for run in runs]
    keys = dict.fromkeys(key for option in options for key in option if not key.startswith("exp_manager."))
    values = {key: [option.get(key, "–") for option in options] for key in keys}
    return {"head": ["key", *names], "rows": [[key, *row] for key, row in values.items() if len(set(row)) > 1]}
