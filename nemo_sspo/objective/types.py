"""What goes into an objective's formula and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_sspo.objective.layout import Layout
from nemo_sspo.objective.statistics import Statistics


@dataclass(frozen=True)
class Inputs:
    """One micro-batch, cleaned: float32 or float64, exact zeros off the mask.

    policy_logprobs: [tokens] log pi_theta, the only tensor with a gradient.
    log_ratio: [tokens] log pi_theta - log pi_old.
    advantages: [B], and token_advantages: [tokens], the same spread over the tokens.
    """

    policy_logprobs: Tensor
    log_ratio: Tensor
    advantages: Tensor
    token_advantages: Tensor
    layout: Layout

    def by_sign(self, positive: float, otherwise: float) -> Tensor:
        """[B]: one value where the advantage is above 0, the other elsewhere."""
        # Not torch.where(..., float, float), which rounds to float32.
        full = self.advantages.new_full
        return torch.where(self.advantages > 0, full((), positive), full((), otherwise))


@dataclass(frozen=True)
class Surrogate:
    """An objective before its mean: J is a mean over tokens of A_i * value_t.

    The gradient of value_t summed over a response is s_i sum_t w_t grad log pi_t (for sequence-level objectives each
    token carries its response's value, and the mean over tokens restores it). Both weights are detached.

    value: [tokens], with gradient. sequence_weight: [B], s_i. token_weight: [tokens], w_t, 1 at pi = pi_old.
    attenuated: [tokens] bool: clipped, or where there is no clip, w_t under one half.
    """

    value: Tensor
    token_weight: Tensor
    sequence_weight: Tensor
    attenuated: Tensor


@dataclass(frozen=True)
class ObjectiveOutput:
    """What an objective returns.

    loss: scalar to minimise, L = -J plus the optional terms; its gradient flows to policy_logprobs (and entropy).
    metrics: detached scalar tensors of these rows alone; the names carry the reduction (`ratio/mean`, `ratio/max`).
    statistics: the sums behind the metrics; add them over micro-batches and ranks, then ask for `.metrics()`.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    statistics: Statistics
