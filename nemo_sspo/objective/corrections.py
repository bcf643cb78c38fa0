"""Corrections for the gap between the generation engine and the trainer, and masks for what they cannot correct.

Responses are sampled by an engine whose probabilities differ a little from the trainer's for the same weights: other
kernels, other precision, in a mixture of experts other routes. With d_t = log pi_old - log pi_rollout, the trainer's
log-probability of a sampled token minus the engine's, k_t = exp(d_t) is the importance ratio that undoes the gap. Each
correction turns it into a detached weight c_t that multiplies the gradient of token t, and its value in the loss.
Masked tokens still count in lengths and denominators.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from nemo_sspo.objective.gates import bounded_exp
from nemo_sspo.objective.layout import Layout

Correction = Literal["token_tis", "sequence_tis", "icepop"]
SequenceMask = Literal["geometric", "max"]


def truncated_importance(
    log_ratio: Tensor, layout: Layout, *, level: Literal["token", "sequence"], cap: float
) -> tuple[Tensor, Tensor]:
    """Truncated importance sampling: c = min(k, cap), per token or of the whole sequence, k_i = exp(sum_t d_t).

    log_ratio: [tokens] d, zero off the mask. cap: > 0, a ratio. Returns the weight [tokens] and where the cap acted
    [tokens] bool. Gradient: none.
    Source: "Your efficient RL framework secretly brings you off-policy RL training" (Yao et al., 2025).
    """
    log_ratio = log_ratio if level == "token" else layout.spread(layout.response_sum(log_ratio))
    return bounded_exp(log_ratio).clamp(max=cap), log_ratio > math.log(cap)


def icepop(log_ratio: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """IcePop: c = k inside the band low <= k <= high, and 0 outside: tokens with too large a gap are masked.

    log_ratio: [tokens] d. Returns the weight [tokens] and where it masks [tokens] bool. Gradient: none.
    Source: IcePop, arXiv 2510.18855, the masking function M.
    """
    ratio = bounded_exp(log_ratio)
    outside = (ratio < low) | (ratio > high)
    return torch.where(outside, 0.0, ratio), outside


def sequence_mask(log_ratio: Tensor, layout: Layout, *, kind: SequenceMask, low: float, high: float) -> Tensor:
    """The responses to leave out, spread over their tokens: [tokens] bool.

    geometric: those whose geometric-mean ratio exp(mean_t d_t) lies outside [low, high]; max: those with any token's
    ratio outside. log_ratio: [tokens] d, zero off the mask. low, high: ratios, low <= high.
    Source: the geometric and the worst-token rejection of "When speed kills stability" (Liu et al., 2025).
    """
    log_low, log_high = math.log(low) if low > 0 else -math.inf, math.log(high)
    if kind == "geometric":
        mean = layout.response_mean(log_ratio)
        outside = (mean < log_low) | (mean > log_high)
    else:
        outside = layout.response_sum(((log_ratio < log_low) | (log_ratio > log_high)).to(log_ratio.dtype)) > 0
    return layout.spread(outside)


@dataclass(frozen=True)
class RolloutCorrection:
    """The corrections an objective applies, put together from its `rollout_*` options.

    correction: "token_tis" | "sequence_tis" with `cap`, "icepop" with `low` and `high`, or None.
    mask: "geometric" | "max" with `mask_low` and `mask_high`, or None; it multiplies the correction.
    """

    correction: Correction | None = None
    cap: float = 2.0
    low: float = 0.5
    high: float = 5.0
    mask: SequenceMask | None = None
    mask_low: float = 0.0
    mask_high: float = math.inf

    def __bool__(self) -> bool:
        """Whether anything is switched on."""
        return self.correction is not None or self.mask is not None

    def __call__(self, log_ratio: Tensor, layout: Layout) -> tuple[Tensor, dict[str, Tensor]]:
        """The weight c [tokens], and what was touched [tokens] bool, by the name of its metric.

        log_ratio: [tokens] d, detached, zero off the mask.
        """
        weight, touched = torch.ones_like(log_ratio), {}
        if self.correction == "token_tis":
            weight, capped = truncated_importance(log_ratio, layout, level="token", cap=self.cap)
            touched["rollout_correction/truncated_token_fraction"] = capped
        elif self.correction == "sequence_tis":
            weight, capped = truncated_importance(log_ratio, layout, level="sequence", cap=self.cap)
            touched["rollout_correction/truncated_response_fraction"] = capped
        elif self.correction == "icepop":
            weight, outside = icepop(log_ratio, low=self.low, high=self.high)
            touched["rollout_correction/masked_token_fraction"] = outside
        if self.mask is not None:
            outside = sequence_mask(log_ratio, layout, kind=self.mask, low=self.mask_low, high=self.mask_high)
            weight = torch.where(outside, 0.0, weight)
            touched["rollout_correction/masked_response_fraction"] = outside
        return weight, touched


def scale_gradient(values: Tensor, weight: Tensor) -> Tensor:
    """The same values, with their gradient multiplied by weight."""
    return values.detach() + weight * (values - values.detach())
