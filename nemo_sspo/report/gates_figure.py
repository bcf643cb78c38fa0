"""The gates side by side: f, f'/f and the weight of a token's gradient over the ratio, and the conditions they meet.

SSPO's gates are drawn beside what they replace: the hard clips of GRPO and GMPO, and the gate of SAPO. GRPO and SAPO
average f over tokens, so that a token's gradient has the weight rho f'; elsewhere f is a factor of the sequence's
geometric mean, and the weight is rho f'/f.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter
from torch import Tensor

from nemo_sspo.errors import UserError
from nemo_sspo.objective import GATES, OBJECTIVES, Gate, bounded_exp, check_conditions
from nemo_sspo.objective.gates import Tau
from nemo_sspo.objective.options import not_one_of
from nemo_sspo.objective.sspo import PRESETS
from nemo_sspo.report.style import BLUE, COLOURS, GREEN, GREY, ORANGE, PURPLE, RED, THEMES, png, svg, theme

CONDITIONS = ("i", "ii", "iii", "iv")
RATIOS = (0.5, 0.8, 1.25, 2.0, 2.5)
"""Where the table gives the weight."""

TemperatureSets = Mapping[str, tuple[float, float]]
"""(tau_pos, tau_neg) by name."""


@dataclass(frozen=True)
class Entry:
    """A row of the table and a line in the figure: a gate at one temperature.

    per_token: the objective averages f over tokens, as GRPO and SAPO do.
    """

    label: str
    gate: Gate
    tau: float | None = None
    per_token: bool = False

    def values(self, ratio: np.ndarray) -> dict[str, np.ndarray]:
        """f, f'/f and the weight of a token's gradient at ratios [N], each [N] in float64, by the names in `ROWS`."""
        x = torch.as_tensor(np.log(ratio), dtype=torch.float64)
        tau = 1.0 if self.tau is None else self.tau
        f, w = self.gate.log_f(x, tau).exp().numpy(), self.gate.weight(x, tau).numpy()
        return {"f": f, "slope": w / ratio, "weight": f * w if self.per_token else w}


@dataclass(frozen=True)
class Row:
    """An entry with what was found: the form of (iii) or None, the conditions that fail, the weights at `RATIOS`."""

    entry: Entry
    kind: str | None
    failures: Mapping[str, str]
    weights: tuple[float, ...]


def temperature_sets(given: tuple[float, ...] = (), preset: str | None = None) -> TemperatureSets:
    """The temperatures to look at: those given, those of a preset, or else the default and every preset.

    A set of equal temperatures appears once, under both names. Raises UserError for an unknown preset.
    """
    if given:
        return {"given": (given[0], given[1])}
    if preset is not None and preset not in PRESETS:
        raise UserError(f"--preset: {not_one_of(preset, PRESETS)}")
    sets = {name: (pair["tau_pos"], pair["tau_neg"]) for name, pair in PRESETS.items() if preset in (None, name)}
    if preset is not None:
        return sets
    default = _default("sspo", "tau_pos"), _default("sspo", "tau_neg")
    same = [name for name, pair in sets.items() if np.allclose(pair, default)]
    return {", ".join(["default", *same]): default} | {n: pair for n, pair in sets.items() if n not in same}


def gate_entries(names: Iterable[str], tau: float) -> list[Entry]:
    """SSPO's gates at one temperature."""
    return [Entry(name, GATES[name], tau if GATES[name].uses_tau else None) for name in names]


def reference_entries(sign: int) -> list[Entry]:
    """What GRPO, GMPO and SAPO do with a token whose advantage has this sign, with their own default options."""
    side = "A > 0" if sign > 0 else "A < 0"
    epsilon = {name: _default(name, "clip_high" if sign > 0 else "clip_low") for name in ("grpo", "gmpo")}
    tau = _default("sapo", "tau_pos" if sign > 0 else "tau_neg")
    return [
        Entry(f"GRPO clip, {side}", _hard_clip(math.log1p(sign * epsilon["grpo"]), sign), per_token=True),
        Entry(f"GMPO clip, {side}", _hard_clip(sign * epsilon["gmpo"], sign)),
        Entry("SAPO", Gate("SAPO", _sapo_log_f, _sapo_weight, "iii.1"), tau, per_token=True),
    ]


def identity_entry() -> Entry:
    """No gate at all, f = rho: GSPO without its clip."""
    return Entry("f = rho", Gate("identity", lambda x, tau: x, lambda x, tau: torch.ones_like(x), "iii.2", False))


def table_rows(sets: TemperatureSets, names: Sequence[str]) -> list[Row]:
    """Every gate at every temperature of the sets, and then what they are compared with."""
    taus = sorted({tau for pair in sets.values() for tau in pair})
    entries = {(entry.label, entry.tau): entry for name in names for tau in taus for entry in gate_entries([name], tau)}
    references = [entry for sign in (1, -1) for entry in reference_entries(sign)]
    references.sort(key=lambda entry: entry.label)
    return [_examine(entry) for entry in [*entries.values(), *references, identity_entry()]]


def format_table(rows: Sequence[Row], sets: TemperatureSets) -> str:
    """The rows as text: yes or no for each condition, weights at `RATIOS`, and below it where a condition fails."""
    width = max(len(row.entry.label) for row in rows)
    heads = [f"w({ratio:g})" for ratio in RATIOS]
    lines = ["Temperatures:"]
    lines += [f"  {name}: {pos:.4g} where A > 0, {neg:.4g} elsewhere" for name, (pos, neg) in sets.items()]
    lines += ["", f"{'gate':{width}}  {'tau':>5}   (i)  (ii)  (iii)  (iv)  " + " ".join(f"{head:>7}" for head in heads)]
    for row in rows:
        tau = "-" if row.entry.tau is None else f"{row.entry.tau:.3g}"
        i, ii, _, iv = ("no" if name in row.failures else "yes" for name in CONDITIONS)
        weights = " ".join(f"{weight:7.3f}" for weight in row.weights)
        lines.append(f"{row.entry.label:{width}}  {tau:>5}   {i:3}  {ii:4}  {row.kind or 'no':5}  {iv:4}  {weights}")
    lines += ["", *_failures(rows)]
    lines += ["", "w: weight of a token's gradient, rho f'/f; for GRPO and SAPO, which average f over tokens, rho f'."]
    return "\n".join(lines)


def gates_figure(sets: TemperatureSets, names: Sequence[str]) -> Figure:
    """A column for each temperature, a row for f, f'/f and the weight; draw it within `style.theme`."""
    columns = [(name, sign, tau) for name, pair in sets.items() for sign, tau in zip((1, -1), pair, strict=True)]
    figure = Figure(figsize=(3.1 * len(columns) + 0.6, 8.6), layout="constrained")
    grid = figure.subplots(len(ROWS), len(columns), sharex=True, sharey="row", squeeze=False)
    for column, (name, sign, tau) in enumerate(columns):
        title = f"{name}\n{'A > 0' if sign > 0 else 'A < 0'}: τ = {tau:.3g}"
        grid[0, column].set_title(title, fontsize=12)
        grid[-1, column].set_xlabel("Ratio ρ of a token", fontsize=11)
        for axes, key in zip(grid[:, column], ROWS, strict=True):
            _draw(axes, key, [*reference_entries(sign), *gate_entries(names, tau)])
    for axes, (key, text) in zip(grid[:, 0], ROWS.items(), strict=True):
        axes.set_ylabel(text, fontsize=11)
        if key == "f":
            axes.set_yscale("log", base=2)
        axes.set_ylim(*LIMITS[key])
        axes.yaxis.set_major_locator(FixedLocator(TICKS[key]))
        axes.yaxis.set_major_formatter(_fraction if key == "f" else _decimal)
        axes.yaxis.set_minor_formatter(NullFormatter())
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=min(len(labels), 4),
        fontsize=11,
        handlelength=3,
        title="Coloured: SSPO's gates. Dashed: f′/f peaks at ρ = 1; solid: w does",
        title_fontsize=11,
    )
    return figure


def write_gates(folder: str | os.PathLike[str], sets: TemperatureSets, names: Sequence[str] | None = None) -> list[str]:
    """Write gates.png and gates.svg into the folder; returns the table and the paths of the two.

    names: keys of `GATES`; None for all. Raises UserError for an unknown gate or a folder that cannot be written.
    """
    for name in names or ():
        if name not in GATES:
            raise UserError(f"--gate: {not_one_of(name, GATES)}")
    names = list(dict.fromkeys(names or GATES))
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with theme("light"):
            figure = gates_figure(sets, names)
            (folder / "gates.png").write_bytes(png(figure))
            (folder / "gates.svg").write_text(svg(figure), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--output: {folder} cannot be written ({error.strerror}); name a folder of yours") from None
    return [format_table(table_rows(sets, names), sets), str(folder / "gates.png"), str(folder / "gates.svg")]


ROWS = {"f": "f(ρ)", "slope": "f′(ρ) / f(ρ)", "weight": "w, a token's weight"}
LIMITS = {"f": (1 / 8, 8), "slope": (0, 2.1), "weight": (0, 2.1)}
TICKS = {"f": (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8), "slope": (0, 0.5, 1, 1.5, 2), "weight": (0, 0.5, 1, 1.5, 2)}
_STYLES = {
    "expsig": {"color": BLUE, "linestyle": "--"},
    "expatan": {"color": GREEN, "linestyle": "--"},
    "gumbel": {"color": PURPLE, "linestyle": "-"},
    "siglog": {"color": ORANGE, "linestyle": "-"},
    "atanlog": {"color": RED, "linestyle": "-", "linewidth": 2.4},
    "GRPO clip": {"color": GREY, "linestyle": (0, (1, 1)), "linewidth": 2.2},
    "GMPO clip": {"color": GREY, "linestyle": "-", "linewidth": 2.2},
    "SAPO": {"color": THEMES["light"]["ink"], "linestyle": ":"},
}


def _draw(axes: Axes, key: str, entries: Sequence[Entry]) -> None:
    ratio = np.exp(np.linspace(-math.log(8), math.log(8), 481))
    for position, entry in enumerate(entries):
        name = entry.label.partition(",")[0]
        style = _STYLES.get(name, {"color": COLOURS[position % len(COLOURS)], "linestyle": "-."})
        axes.plot(ratio, entry.values(ratio)[key], label=name, **style)
    axes.axvline(1, color=GREY, linewidth=0.8, zorder=0)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / 8, 8)
    axes.xaxis.set_major_locator(FixedLocator(TICKS["f"]))
    axes.xaxis.set_major_formatter(_fraction)
    axes.tick_params(labelsize=10)


def _fraction(value: float, _: object = None) -> str:
    return f"1/{1 / value:g}" if value < 1 else f"{value:g}"


def _decimal(value: float, _: object = None) -> str:
    return f"{value:g}"


def _default(objective: str, option: str) -> float:
    return float(OBJECTIVES[objective].options[option].default)


def _hard_clip(bound: float, sign: int) -> Gate:
    """The clip in log space at `bound`: above it where the advantage is positive, below it where it is negative."""
    low, high = (None, bound) if sign > 0 else (bound, None)

    def weight(x: Tensor, tau: Tau) -> Tensor:
        return ((x <= bound) if sign > 0 else (x >= bound)).to(x.dtype)

    return Gate("clip", lambda x, tau: x.clamp(low, high), weight, "iii.1", uses_tau=False)


def _sapo_log_f(x: Tensor, tau: Tau) -> Tensor:
    return math.log(4 / tau) + torch.nn.functional.logsigmoid(tau * (bounded_exp(x) - 1))


def _sapo_weight(x: Tensor, tau: Tau) -> Tensor:
    return bounded_exp(x) * tau * torch.sigmoid(-tau * (bounded_exp(x) - 1))


def _examine(entry: Entry) -> Row:
    report = check_conditions(entry.gate, (1.0 if entry.tau is None else entry.tau,))
    weights = tuple(float(weight) for weight in entry.values(np.array(RATIOS))["weight"])
    return Row(entry, report.kind, report.failures, weights)


def _failures(rows: Sequence[Row]) -> list[str]:
    lines = [f"{row.entry.label}: ({name}) {line}" for row in rows for name, line in row.failures.items()]
    return ["Where a condition fails:", *(f"  {line}" for line in lines)] if lines else []
