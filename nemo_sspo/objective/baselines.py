"""The objectives that SSPO is compared with, each a pure function of one micro-batch.

A function gives the value of every token; the mean that turns it into J (over responses, over tokens, or a plain sum)
is part of the objective's entry in `registry.py`. Where two objectives differ only by that mean they share a function:
DAPO and Dr.GRPO are `grpo`, LUSPO is `gspo`. rho_t = exp(x_t), x_t the log-ratio, A_i the advantage, |y_i| the length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_sspo.objective.gates import GATES, LOG_RATIO_LIMIT, bounded_exp
from nemo_sspo.objective.types import Inputs, Surrogate


def grpo(inputs: Inputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Token-level clipping.

        A v_t = min( rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A )

    Weights: s_i = 1, w_t = rho_t, or 0 where the clip stops the gradient.
    Source: GRPO, arXiv 2402.03300, its objective (mean over tokens, then responses); DAPO, arXiv 2503.14476 (mean over
    all tokens, clip_high > clip_low); Dr.GRPO, arXiv 2503.20783 (sum over tokens).
    """
    value, clipped = _clip(bounded_exp(inputs.log_ratio), inputs.token_advantages, 1 - clip_low, 1 + clip_high)
    weight = torch.where(clipped, 0.0, value.detach())
    return Surrogate(value, weight, torch.ones_like(inputs.advantages), clipped)


def gspo(inputs: Inputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Sequence-level clipping of the geometric-mean ratio.

        J_i = min( s_i A, clip(s_i, 1 - clip_low, 1 + clip_high) A ),    s_i = exp( 1/|y_i| sum_t x_t )

    Weights: s_i as above, w_t = 1, or 0 in a clipped response.
    Source: GSPO, arXiv 2507.18071, its sequence-level objective; LUSPO, arXiv 2602.05261 (J_i times |y_i|).
    """
    ratio = bounded_exp(inputs.layout.response_mean(inputs.log_ratio))
    value, clipped = _clip(inputs.layout.spread(ratio), inputs.token_advantages, 1 - clip_low, 1 + clip_high)
    return Surrogate(value, (~clipped).to(ratio.dtype), ratio.detach(), clipped)


def gspo_token(inputs: Inputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """GSPO written per token, which leaves room for advantages per token; with one advantage per response, equal to it.

        A v_t = min( s_t A, clip(s_t, 1 - clip_low, 1 + clip_high) A ),    s_t = sg[s_i] pi_t / sg[pi_t]

    Weights as for `gspo`. Source: GSPO, arXiv 2507.18071, its token-level variant.
    """
    x = inputs.log_ratio
    ratio = bounded_exp(inputs.layout.response_mean(x.detach()))
    token_ratio = inputs.layout.spread(ratio) * (x - x.detach()).exp()
    value, clipped = _clip(token_ratio, inputs.token_advantages, 1 - clip_low, 1 + clip_high)
    return Surrogate(value, (~clipped).to(ratio.dtype), ratio, clipped)


def gmpo(inputs: Inputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """Geometric mean of token ratios that are clipped in log space, on the side that the advantage's sign chooses.

        J_i = A_i exp( 1/|y_i| sum_t c_t ),    c_t = sgn min( sgn x_t, sgn clamp(x_t, -clip_low, clip_high) )
        sgn = sign(A_i)

    Weights: s_i = exp(mean c), w_t = 1, or 0 where clipped.
    Source: GMPO, arXiv 2507.20673, the objective with its token-level clip, applied in log space.
    """
    clipped_log_ratio, clipped = _clip(inputs.log_ratio, inputs.token_advantages, -clip_low, clip_high)
    sequence_weight = bounded_exp(inputs.layout.response_mean(clipped_log_ratio))
    weight = (~clipped).to(sequence_weight.dtype)
    return Surrogate(inputs.layout.spread(sequence_weight), weight, sequence_weight.detach(), clipped)


def sapo(inputs: Inputs, *, tau_pos: float, tau_neg: float) -> Surrogate:
    """A soft gate on every token instead of a clip.

        A v_t = A (4 / tau) sigmoid( tau (rho_t - 1) ),    tau = tau_pos where A > 0, else tau_neg

    Weights: s_i = 1, w_t = rho_t sech^2( tau (rho_t - 1) / 2 ), which is the weight of the gate `expsig`.
    Source: SAPO, arXiv 2511.20347, its token-level gate.
    """
    tau = inputs.layout.spread(inputs.by_sign(tau_pos, tau_neg))
    value = (4 / tau) * torch.sigmoid(tau * (bounded_exp(inputs.log_ratio) - 1))
    weight = GATES["expsig"].weight(inputs.log_ratio.detach(), tau)
    return Surrogate(value, weight, torch.ones_like(inputs.advantages), weight < 0.5)


def cispo(inputs: Inputs, *, clip_low: float, clip_high: float) -> Surrogate:
    """REINFORCE with a clipped importance weight that carries no gradient: every token keeps a gradient.

        A v_t = A sg[ clip(rho_t, 1 - clip_low, 1 + clip_high) ] log pi_t

    Weights: s_i = 1, w_t = the clipped ratio; `attenuated` counts the ratios that the clip changed.
    Source: CISPO, MiniMax-M1, arXiv 2506.13585. As there, only the upper bound acts by default
    (clip_low = 1); the bound of 5 is ScaleRL's, arXiv 2510.13786.
    """
    ratio = bounded_exp(inputs.log_ratio.detach())
    weight = ratio.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(weight * inputs.policy_logprobs, weight, torch.ones_like(inputs.advantages), weight != ratio)


def reinforce(inputs: Inputs) -> Surrogate:
    """Plain REINFORCE, without ratio or clip: right on-policy, biased on stale rollouts.

        A v_t = A log pi_t        (summed over a response's tokens)

    Weights: s_i = w_t = 1. With leave-one-out advantages this is RLOO.
    Source: RLOO, arXiv 2402.14740.
    """
    ones = torch.ones_like(inputs.policy_logprobs)
    return Surrogate(inputs.policy_logprobs, ones, torch.ones_like(inputs.advantages), ones < 0.5)


def vespo(inputs: Inputs, *, k_pos: float, lambda_pos: float, k_neg: float, lambda_neg: float) -> Surrogate:
    """REINFORCE with a Gamma-shaped weight of the whole sequence's ratio, which carries no gradient.

        A v_t = A sg[ phi(W_i) ] log pi_t,    phi(W) = W^k exp( lambda (1 - W) ),    W_i = exp( sum_t x_t )

    k and lambda are k_pos and lambda_pos where A > 0, else k_neg and lambda_neg. W is not normalised by length; its
    log is clamped to +-20. Weights: s_i = 1, w_t = phi(W_i), the objective's gate.
    Source: VESPO, arXiv 2602.10693, its reshaping kernel.
    """
    k, decay = inputs.by_sign(k_pos, k_neg), inputs.by_sign(lambda_pos, lambda_neg)
    log_ratio = inputs.layout.response_sum(inputs.log_ratio.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    weight = inputs.layout.spread((k * log_ratio - decay * log_ratio.expm1()).exp())
    return Surrogate(weight * inputs.policy_logprobs, weight, torch.ones_like(inputs.advantages), weight < 0.5)


def _clip(values: Tensor, advantages: Tensor, low: float, high: float) -> tuple[Tensor, Tensor]:
    """The pessimistic clip v with A v = min(values A, clamp(values, low, high) A), and where it acts (bool).

    Written with `where` rather than `minimum`, which halves gradients at ties.
    """
    clipped = ((advantages > 0) & (values > high)) | ((advantages < 0) & (values < low))
    return torch.where(clipped, values.clamp(low, high), values), clipped
