"""Terms that may be added to a loss: the divergence from a reference model (an entropy bonus needs no formula)."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from nemo_sspo.objective.gates import LOG_RATIO_LIMIT

KlEstimator = Literal["k1", "k2", "k3"]
KL_ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")


def kl_estimate(policy_logprobs: Tensor, reference_logprobs: Tensor, estimator: KlEstimator = "k3") -> Tensor:
    """An estimate of KL(policy || reference) from each sampled token, elementwise, in nats.

    With d = log pi_reference - log pi_policy, clamped to +-20 in the exp:

        k1   -d                 unbiased; its own gradient has mean zero, so as a loss it does not regularise
        k2   d^2 / 2            biased, low variance; its gradient is that of the divergence, on-policy
        k3   exp(d) - 1 - d     unbiased, never negative, low variance: the GRPO term

    policy_logprobs, reference_logprobs: the same shape. Gradient: to policy_logprobs.
    Source: J. Schulman, "Approximating KL divergence" (2020); k3 in GRPO, arXiv 2402.03300.
    """
    d = reference_logprobs.detach() - policy_logprobs
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return d.square() / 2
    return d.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).expm1() - d
