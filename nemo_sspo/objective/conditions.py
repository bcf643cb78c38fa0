"""The conditions that a gate must meet, checked by number, and the door for gates of your own.

    (i)     f is continuously differentiable
    (ii)    f(1) = 1 and f'(1) = 1
    (iii.1) f'/f, or (iii.2) w = rho f'/f, is a bell whose only maximum is at rho = 1, and w -> 0 as rho -> inf;
            (iii.2) also w -> 0 as rho -> 0
    (iv)    f never decreases

Source: arXiv 2602.19327, the conditions on the gate. A hard clip fails (i), plain importance sampling (f = rho) (iii).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemo_sspo.errors import UserError
from nemo_sspo.objective.gates import GATES, Gate, GateFunction, Tau
from nemo_sspo.objective.options import key

TEMPERATURES = (0.2, 1.0, 5.0)
RANGE = 10.0  # log-ratios looked at closely
FAR = 1e4  # a log-ratio that stands for infinity
STEP = 1e-3
TOLERANCE = 1e-6


@dataclass(frozen=True)
class ConditionReport:
    """What `check_conditions` found: which form of (iii) holds, and a line for each condition that fails."""

    kind: Literal["iii.1", "iii.2"] | None
    failures: dict[str, str]

    @property
    def ok(self) -> bool:
        """Whether every condition holds."""
        return not self.failures


def check_conditions(gate: Gate, temperatures: Sequence[float] = TEMPERATURES) -> ConditionReport:
    """Checks conditions (i) to (iv) on a grid of log-ratios in float64, at each temperature.

    A check by number cannot prove; it finds jumps above about 1e-3 and slopes of the wrong sign above 1e-6.
    The keys of `failures` are "finite", "weight", "i", "ii", "iii", "iv".
    """
    failures: dict[str, str] = {}
    kinds = {"iii.1", "iii.2"}
    for tau in temperatures if gate.uses_tau else (1.0,):
        at = f" at tau = {tau:g}" if gate.uses_tau else ""
        for name, line in _failures(gate, tau, kinds):
            failures.setdefault(name, line + at)
    kind = None if "iii" in failures else "iii.2" if "iii.2" in kinds else "iii.1"
    return ConditionReport(kind, failures)


def register_gate(
    name: str,
    log_f: GateFunction,
    weight: GateFunction | None = None,
    *,
    uses_tau: bool = True,
    formula: str = "",
    temperatures: Sequence[float] = TEMPERATURES,
) -> Gate:
    """Adds a gate to `GATES`, so that `build_objective({"name": "sspo", "gate": name})` finds it.

    log_f(log_ratio, tau): log f, elementwise, differentiable, finite for every finite log-ratio (use `bounded_exp`
    where the formula needs rho). weight(log_ratio, tau): its derivative in log_ratio; by default by autograd.
    temperatures: those that the conditions are checked at.
    Errors: UserError if the name is taken or a condition fails; the message says which and where.
    """
    if name in GATES:
        raise UserError(f"{key('gate')}: the name {name!r} is taken; allowed: a name other than {', '.join(GATES)}.")
    gate = Gate(name, log_f, weight or _derivative(log_f), "iii.2", uses_tau, formula)
    report = check_conditions(gate, temperatures)
    if report.kind is None or not report.ok:
        lines = "; ".join(f"({condition}) {line}" for condition, line in report.failures.items())
        raise UserError(f"{key('gate')}: {name!r} does not meet the conditions on a gate: {lines}.")
    GATES[name] = Gate(name, log_f, gate.weight, report.kind, uses_tau, formula)
    return GATES[name]


def _derivative(log_f: GateFunction) -> GateFunction:
    def weight(log_ratio: Tensor, tau: Tau) -> Tensor:
        with torch.enable_grad():
            x = log_ratio.detach().requires_grad_()
            (slope,) = torch.autograd.grad(log_f(x, tau).sum(), x)
        return slope

    return weight


def _failures(gate: Gate, tau: float, kinds: set[str]) -> list[tuple[str, str]]:
    """Name and line of each condition that fails at this temperature; `kinds` loses the forms of (iii) that fail."""
    steps = round(RANGE / STEP)
    x = torch.arange(-steps, steps + 1, dtype=torch.float64) * STEP
    far = torch.tensor([-FAR, FAR], dtype=torch.float64)
    slope = _derivative(gate.log_f)
    w, w_far = slope(x, tau), slope(far, tau)
    if not all(bool(torch.isfinite(value).all()) for value in (gate.log_f(x, tau), w, gate.log_f(far, tau), w_far)):
        kinds.clear()
        everywhere = torch.cat((x, far))
        bad = ~(torch.isfinite(gate.log_f(everywhere, tau)) & torch.isfinite(slope(everywhere, tau)))
        nearest = everywhere[bad][everywhere[bad].abs().argmin()]
        return [("finite", f"log f or its derivative is not finite at {_at(nearest)}")]

    found = []
    if not torch.allclose(gate.weight(x, tau), w, rtol=TOLERANCE, atol=TOLERANCE):
        place = x[(gate.weight(x, tau) - w).abs().argmax()]
        found.append(("weight", f"the weight is not the derivative of log f, most at {_at(place)}"))

    for name, function in (("f", gate.log_f), ("f'", slope)):
        place = _jump(function, tau, x)
        if place is not None:
            found.append(("i", f"{name} jumps at {_at(place)}"))
            break

    middle = steps
    log_f_1, w_1 = float(gate.log_f(x, tau)[middle]), float(w[middle])
    if abs(log_f_1) > TOLERANCE or abs(w_1 - 1) > TOLERANCE:
        found.append(("ii", f"log f(1) = {log_f_1:.3g}, f'(1) = {math.exp(log_f_1) * w_1:.3g}"))

    vanishes_above, vanishes_below = abs(float(w_far[1])) < 1e-2, abs(float(w_far[0])) < 1e-2
    slope_fault = _fault_of_bell(w * (-x).exp(), x)
    w_fault = _fault_of_bell(w, x) or (None if vanishes_below else f"stays at {float(w_far[0]):.3g} as rho -> 0")
    if not vanishes_above or slope_fault:
        kinds.discard("iii.1")
    if not vanishes_above or w_fault:
        kinds.discard("iii.2")
    if not vanishes_above:
        found.append(("iii", f"w does not vanish as rho grows: w = {float(w_far[1]):.3g} at {_at(far[1])}"))
    elif slope_fault and w_fault:
        found.append(("iii", f"neither f'/f nor w is a bell around rho = 1: f'/f {slope_fault}, w {w_fault}"))
    elif not kinds:
        found.append(("iii", "neither form of (iii) holds at every temperature"))

    if float(w.min()) < -TOLERANCE:
        found.append(("iv", f"f decreases at {_at(x[w.argmin()])}"))
    return found


def _at(log_ratio: Tensor | float) -> str:
    """A place, for people: the log-ratio, and the ratio where that is a number one can read."""
    x = float(log_ratio)
    return f"log rho = {x:.3g}" + (f" (ratio {math.exp(x):.3g})" if abs(x) <= RANGE else "")


def _fault_of_bell(values: Tensor, x: Tensor) -> str | None:
    """What keeps values [N] over x [N] from a bell, and where; None for a bell.

    A bell rises up to the middle, falls from there on, and is strictly lower at a distance of 0.1 than in the middle.
    """
    middle, reach = len(x) // 2, round(0.1 / STEP)
    wrong_way = values.diff()
    wrong_way[:middle] *= -1
    worst = int(wrong_way.argmax())
    if float(wrong_way[worst]) > TOLERANCE * float(values.abs().max()):
        return f"{'falls' if worst < middle else 'rises'} at {_at(x[worst])}"
    for edge in (middle - reach, middle + reach):
        if float(values[edge]) >= float(values[middle]) - TOLERANCE:
            return f"is flat from rho = 1 to {_at(x[edge])}"
    return None


def _jump(function: GateFunction, tau: float, x: Tensor) -> float | None:
    """Where a function jumps, or None: the change over a cell that does not shrink with the cell."""
    change = function(x, tau).diff().abs()
    cell = int(change.argmax())
    fine = torch.linspace(float(x[cell]), float(x[cell + 1]), 1001, dtype=x.dtype)
    within = function(fine, tau).diff().abs()
    if float(change[cell]) < 1e-3 or float(within.max()) < float(change[cell]) / 2:
        return None
    return float(fine[within.argmax()])
