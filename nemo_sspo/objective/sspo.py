"""Soft Sequence Policy Optimization (arXiv 2602.19327)."""

from __future__ import annotations

from nemo_sspo.objective.gates import Gate, bounded_exp
from nemo_sspo.objective.types import Inputs, Surrogate

PRESETS = {
    "paper_literal": {"tau_pos": 0.2, "tau_neg": 0.3},
    "paper_scale": {"tau_pos": 1 / 0.3, "tau_neg": 1 / 0.2},
}
"""Two readings of the paper's printed temperatures, (0.3, 0.2) for (tau_neg, tau_pos): as factors of x, which hardly
attenuates, and as scales, x / tau, in the order (tau_pos, tau_neg). The second is the default."""


def sspo(inputs: Inputs, *, gate: Gate, tau_pos: float, tau_neg: float) -> Surrogate:
    """The geometric mean of the gated token ratios, times the advantage.

        J_i = F_i A_i,    F_i = exp( 1/|y_i| sum_t log f(rho_t; tau) ),    tau = tau_pos where A_i > 0, else tau_neg
        grad J_i = A_i F_i 1/|y_i| sum_t w(rho_t; tau) grad log pi_t

    Weights: s_i = F_i, w_t = the gate's w. With f = rho this is GSPO without its clip, and with a hard clip it is GMPO.
    Source: arXiv 2602.19327, the SSPO objective and its gradient.
    """
    layout = inputs.layout
    tau = layout.spread(inputs.by_sign(tau_pos, tau_neg))
    sequence_weight = bounded_exp(layout.response_mean(gate.log_f(inputs.log_ratio, tau)))
    weight = gate.weight(inputs.log_ratio.detach(), tau)
    return Surrogate(layout.spread(sequence_weight), weight, sequence_weight.detach(), weight < 0.5)
