"""Group advantages: a response's reward compared with those of the other responses to the same prompt."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_sspo.errors import UserError
from nemo_sspo.objective.gates import compute_dtype
from nemo_sspo.objective.options import key, not_one_of

ADVANTAGES = ("grpo", "rloo", "dr_grpo")
EPSILON = 1e-6
"""Added to the standard deviation of `grpo`."""


def group_advantages(rewards: Tensor, kind: str = "grpo") -> Tensor:
    """The advantage of each response within its group.

    rewards: [P, G] for P prompts of G responses each, G >= 2; any real unit. Returns [P, G], detached: float64 for
    float64, else float32. With mean and std over a group's G rewards:

        grpo      (r - mean) / (std + 1e-6)     std with Bessel's correction (divisor G - 1), as in the GRPO pipelines
        dr_grpo   r - mean                      no division by the std (arXiv 2503.20783)
        rloo      r - mean of the other G - 1   = (r - mean) * G / (G - 1) (arXiv 2402.14740)

    A group of equal rewards gives exact zeros: it teaches nothing (`count_equal_groups` counts them).
    Gradient: none. Errors: UserError for an unknown kind; ValueError for another shape, G < 2 or a non-finite reward.
    Source: GRPO, arXiv 2402.03300, with rewards of outcomes.
    """
    if kind not in ADVANTAGES:
        raise UserError(f"{key('advantages')}: {not_one_of(kind, ADVANTAGES)}")
    rewards = _checked(rewards)
    size = rewards.shape[1]
    centred = rewards - rewards.mean(1, keepdim=True)
    if kind == "grpo":
        std = (centred.square().sum(1, keepdim=True) / (size - 1)).sqrt()
        centred = centred / (std + EPSILON)
    elif kind == "rloo":
        centred = centred * (size / (size - 1))
    return torch.where(_equal(rewards)[:, None], 0.0, centred)


def count_equal_groups(rewards: Tensor) -> Tensor:
    """How many of the P groups in `rewards` [P, G] have equal rewards, hence zero advantages: an int64 scalar."""
    return _equal(_checked(rewards)).sum()


def _equal(rewards: Tensor) -> Tensor:
    # The mean of equal floats need not be that float: compare with the first reward, not with the mean.
    return (rewards == rewards[:, :1]).all(1)


def _checked(rewards: Tensor) -> Tensor:
    if rewards.dim() != 2:
        raise ValueError(f"rewards has shape {tuple(rewards.shape)}; it must be [prompts, responses per prompt].")
    if rewards.shape[1] < 2:
        raise ValueError(
            f"rewards has shape {tuple(rewards.shape)}: a group of {rewards.shape[1]} has nothing to compare with. "
            "Sample at least 2 responses per prompt."
        )
    rewards = rewards.detach().to(compute_dtype(rewards.dtype))
    bad = (~torch.isfinite(rewards)).nonzero()
    if len(bad):
        raise ValueError(
            f"rewards: {len(bad)} non-finite values, the first at (prompt, response) {tuple(bad[0].tolist())}."
        )
    return rewards
