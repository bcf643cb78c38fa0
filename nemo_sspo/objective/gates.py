"""The gates of Soft Sequence Policy Optimization (arXiv 2602.19327), in closed form and in log space.

A gate f turns a token's ratio rho = pi_theta / pi_old into its factor of the sequence weight F. Only two functions of
the log-ratio x = log rho are ever needed:

    log f(rho)                          the factor, as F = exp(mean over tokens of log f)
    w(rho) = d log f / d log rho        the token's weight in the gradient

Every gate has f(1) = 1 and w(1) = 1, so that the first update after a rollout is the plain policy gradient, and w -> 0
far from rho = 1. The temperature tau multiplies: a larger tau decays faster. `nemo_sspo.objective.conditions` checks
these properties by number.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemo_sspo.errors import UserError
from nemo_sspo.objective.options import key, not_one_of

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before any exp: e^20 is finite in float32, also after multiplying or squaring it."""

Tau = float | Tensor


def compute_dtype(*dtypes: torch.dtype) -> torch.dtype:
    """The dtype the objective computes in: float64 if any input is float64, else float32 (bf16 and half go up)."""
    return torch.float64 if torch.float64 in dtypes else torch.float32


def bounded_exp(log_value: Tensor) -> Tensor:
    """Exponential of a value clamped to +-20; outside the clamp the gradient is zero."""
    return log_value.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def _excess(log_ratio: Tensor) -> Tensor:
    """The ratio minus 1, without the cancellation of exp(x) - 1 near x = 0."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1()


def _sech_squared_of_half(z: Tensor) -> Tensor:
    """sech^2(z / 2) = 4 sigmoid(z) sigmoid(-z): exact for small z, and no overflow for large."""
    return 4.0 * torch.sigmoid(z) * torch.sigmoid(-z)


# Each (4 / tau)(sigmoid(z) - 1/2) is written as (2 / tau) tanh(z / 2), the same function without cancellation at z = 0.
def _expsig_log_f(x: Tensor, tau: Tau) -> Tensor:
    return torch.tanh(tau * _excess(x) / 2) * 2 / tau


def _expsig_weight(x: Tensor, tau: Tau) -> Tensor:
    return bounded_exp(x) * _sech_squared_of_half(tau * _excess(x))


def _expatan_log_f(x: Tensor, tau: Tau) -> Tensor:
    return torch.atan(tau * _excess(x)) / tau


def _expatan_weight(x: Tensor, tau: Tau) -> Tensor:
    return bounded_exp(x) / (1 + (tau * _excess(x)).square())


def _gumbel_log_f(x: Tensor, tau: Tau) -> Tensor:
    return -torch.expm1(-_excess(x))


def _gumbel_weight(x: Tensor, tau: Tau) -> Tensor:
    return bounded_exp(x) * torch.exp(-_excess(x))


def _siglog_log_f(x: Tensor, tau: Tau) -> Tensor:
    return torch.tanh(tau * x / 2) * 2 / tau


def _siglog_weight(x: Tensor, tau: Tau) -> Tensor:
    return _sech_squared_of_half(tau * x)


def _atanlog_log_f(x: Tensor, tau: Tau) -> Tensor:
    return torch.atan(tau * x) / tau


def _atanlog_weight(x: Tensor, tau: Tau) -> Tensor:
    return 1 / (1 + (tau * x).square())


GateFunction = Callable[[Tensor, Tau], Tensor]


@dataclass(frozen=True)
class Gate:
    """A gate: `log_f(log_ratio, tau)` and its derivative in log_ratio, `weight(log_ratio, tau)`, both elementwise.

    kind: "iii.1" where f'/f peaks at rho = 1, "iii.2" where w = rho f'/f does (the paper's condition (iii)).
    uses_tau: False for a gate without a temperature, which ignores its argument.
    formula: log f, for people.
    """

    name: str
    log_f: GateFunction
    weight: GateFunction
    kind: Literal["iii.1", "iii.2"]
    uses_tau: bool = True
    formula: str = ""


GATES: dict[str, Gate] = {
    gate.name: gate
    for gate in (
        Gate("expsig", _expsig_log_f, _expsig_weight, "iii.1", formula="(4/tau)(sigmoid(tau(rho-1)) - 1/2)"),
        Gate("expatan", _expatan_log_f, _expatan_weight, "iii.1", formula="(1/tau) atan(tau(rho-1))"),
        Gate("gumbel", _gumbel_log_f, _gumbel_weight, "iii.2", uses_tau=False, formula="1 - exp(1-rho)"),
        Gate("siglog", _siglog_log_f, _siglog_weight, "iii.2", formula="(4/tau)(sigmoid(tau log rho) - 1/2)"),
        Gate("atanlog", _atanlog_log_f, _atanlog_weight, "iii.2", formula="(1/tau) atan(tau log rho)"),
    )
}
"""The gates by name: the paper's five, and those added with `register_gate`."""


def find_gate(name: str) -> Gate:
    """The gate of that name. Raises UserError, with the nearest name, where there is none."""
    if not isinstance(name, str) or name not in GATES:
        raise UserError(f"{key('gate')}: {not_one_of(name, GATES)}")
    return GATES[name]


def log_gate(name: str, log_ratio: Tensor, tau: Tau = 1.0) -> Tensor:
    """A gate's log f(rho; tau), elementwise.

    name: a key of `GATES`. log_ratio: any shape, log rho in nats. tau: > 0, a number or a tensor that broadcasts
    against log_ratio (its sign is then not checked). Returns the shape of log_ratio (broadcast), float64 for float64,
    else float32.
    Gradient: flows to log_ratio and equals `gate_weight`; the gates of rho itself are constant beyond |log rho| = 20.
    Errors: UserError for an unknown gate or tau <= 0.
    Source: arXiv 2602.19327, the table of gates.
    """
    return find_gate(name).log_f(*_prepare(log_ratio, tau))


def gate_weight(name: str, log_ratio: Tensor, tau: Tau = 1.0) -> Tensor:
    """A gate's w(rho; tau) = d log f / d log rho, elementwise: the token's weight in the gradient, 1 at rho = 1.

    Arguments, shapes, errors and source as for `log_gate`. Use it detached; the objective never differentiates it.
    """
    return find_gate(name).weight(*_prepare(log_ratio, tau))


def _prepare(log_ratio: Tensor, tau: Tau) -> tuple[Tensor, Tau]:
    if isinstance(tau, Tensor):
        dtype = compute_dtype(log_ratio.dtype, tau.dtype if tau.dim() else log_ratio.dtype)
        return log_ratio.to(dtype), tau.to(log_ratio.device, dtype)
    if isinstance(tau, bool) or not isinstance(tau, int | float) or not (0 < tau < math.inf):
        raise UserError(f"tau: {tau!r} given; a gate's temperature must be a finite number above 0.")
    return log_ratio.to(compute_dtype(log_ratio.dtype)), float(tau)
