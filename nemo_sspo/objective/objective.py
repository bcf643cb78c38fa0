"""The objective: a formula, a mean and optional terms, put together into a loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nemo_sspo.objective.checks import check_shapes, check_values
from nemo_sspo.objective.chunks import chunk_rows, sum_over_chunks
from nemo_sspo.objective.corrections import RolloutCorrection, scale_gradient
from nemo_sspo.objective.gates import bounded_exp, compute_dtype
from nemo_sspo.objective.layout import Layout, Reduce, make_layout
from nemo_sspo.objective.options import key
from nemo_sspo.objective.regularizers import KlEstimator, kl_estimate
from nemo_sspo.objective.statistics import measure
from nemo_sspo.objective.types import Inputs, ObjectiveOutput, Surrogate

Formula = Callable[[Inputs], Surrogate]
Mean = Literal["response_mean", "token_mean", "token_sum"]


@dataclass(frozen=True)
class Objective:
    """A policy objective; make one with `build_objective`.

    name, options: what it was built from, every default filled in.
    formula: the value v of every token. mean: how values become J, with D the global denominator:

        response_mean   1/D sum_i A_i 1/|y_i| sum_t v_t      D = num_responses
        token_mean      1/D sum_i A_i sum_t v_t              D = num_tokens
        token_sum       1/D sum_i A_i sum_t v_t / L          D = num_responses, L = length_scale

    advantages: the kind of `group_advantages` that the objective is defined with.
    kl_coeff, entropy_coeff: L = -J + kl_coeff * KL - entropy_coeff * H, where KL and H take the same mean as J.
    correction: what is done about the gap between the generation engine and the trainer.
    """

    name: str
    options: Mapping[str, Any]
    formula: Formula
    mean: Mean
    advantages: str = "grpo"
    length_scale: float = 1.0
    kl_coeff: float = 0.0
    kl_estimator: KlEstimator = "k3"
    entropy_coeff: float = 0.0
    correction: RolloutCorrection = field(default_factory=RolloutCorrection)
    check_finite: bool = True

    def __call__(
        self,
        policy_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        num_responses: float | Tensor | None = None,
        num_tokens: float | Tensor | None = None,
        reference_logprobs: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
        entropy: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        reduce: Reduce | None = None,
    ) -> ObjectiveOutput:
        """The loss L = -J of one micro-batch, and its metrics.

        policy_logprobs, old_logprobs: [B, T] nats, of the token at that place. advantages: [B]. mask: [B, T], bool or
        0 / 1, true on response tokens; off it the values may be anything, nan included.
        num_responses, num_tokens: responses and response tokens of the *global* batch, of which these rows are a
        part; losses of the parts then add up to the loss of the whole. By default these rows are the whole.
        reference_logprobs: [B, T], needed with kl_coeff > 0. entropy: [B, T] nats of the policy's distribution, needed
        with entropy_coeff > 0. rollout_logprobs: [B, T] of the generation engine, needed with a rollout correction.
        Given without its option, each of them is only measured.
        cu_seqlens: [B + 1] integers for packed rows; the other tensors are then [N] instead of [B, T].
        reduce: sums a tensor over the ranks that hold the other tokens of these responses (see `Reduce`).

        Gradient: to policy_logprobs and entropy, once. A response without tokens counts in the denominator and adds
        zero; an empty micro-batch gives a zero that can be differentiated. Log-ratios are clamped to +-20 before any
        exp, beyond which the gradient of that factor is zero.
        Errors: ValueError for a missing argument, for shapes that do not match (with both shapes), and, unless built
        with check_finite=False, for values that are not finite (count and first place).
        """
        _check_given("kl_coeff", self.kl_coeff > 0, "reference_logprobs", reference_logprobs)
        _check_given("entropy_coeff", self.entropy_coeff > 0, "entropy", entropy)
        _check_given("rollout_correction", bool(self.correction), "rollout_logprobs", rollout_logprobs)
        optional = {"reference_logprobs": reference_logprobs, "rollout_logprobs": rollout_logprobs, "entropy": entropy}
        tokens = {"policy_logprobs": policy_logprobs, "old_logprobs": old_logprobs, **optional, "mask": mask}
        check_shapes(tokens, advantages, cu_seqlens)
        rows = chunk_rows(mask) if cu_seqlens is None and reduce is None else 0
        if rows:
            return self._in_chunks(
                rows, policy_logprobs, old_logprobs, advantages, mask, num_responses, num_tokens, optional
            )
        inputs = self._inputs(policy_logprobs, old_logprobs, advantages, mask, cu_seqlens, reduce, optional)
        layout, extras = inputs.layout, {}

        def mean(values: Tensor) -> Tensor:
            return self._mean(values, layout, num_responses, num_tokens)

        if rollout_logprobs is None:
            surrogate = self.formula(inputs)
            value = surrogate.value
        else:
            gap = (layout.select(old_logprobs) - layout.select(rollout_logprobs)).detach()
            weight, touched = self.correction(gap, layout)
            extras |= {"rollout_ratio/mean": bounded_exp(gap), "rollout_ratio/max": bounded_exp(gap), **touched}
            surrogate = self.formula(_with_scaled_gradient(inputs, weight))
            value = surrogate.value + (weight - 1) * surrogate.value.detach()
        loss = -mean(value * inputs.token_advantages)
        if reference_logprobs is not None:
            extras["kl/mean"] = kl_estimate(
                inputs.policy_logprobs, layout.select(reference_logprobs), self.kl_estimator
            )
            if self.kl_coeff > 0:
                loss = loss + self.kl_coeff * mean(extras["kl/mean"])
        if entropy is not None:
            extras["entropy/mean"] = layout.select(entropy)
            if self.entropy_coeff > 0:
                loss = loss - self.entropy_coeff * mean(extras["entropy/mean"])
        statistics = measure(inputs, surrogate, extras)
        return ObjectiveOutput(loss, statistics.metrics(), statistics)

    def _in_chunks(
        self,
        rows: int,
        policy_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        num_responses: float | Tensor | None,
        num_tokens: float | Tensor | None,
        optional: Mapping[str, Tensor | None],
    ) -> ObjectiveOutput:
        """The same loss, gradient and metrics, `rows` rows of [B, T] at a time; shapes are checked."""
        if self.check_finite:
            tokens = {"policy_logprobs": policy_logprobs, "old_logprobs": old_logprobs, **optional}
            check_values(tokens, advantages, mask, None, make_layout(mask, advantages.numel(), torch.float32))
        own = {
            "num_responses": mask.shape[0] if num_responses is None else num_responses,
            "num_tokens": mask.count_nonzero() if num_tokens is None else num_tokens,
        }
        others = {name: value for name, value in optional.items() if name != "entropy"}
        part, statistics = replace(self, check_finite=False), []

        def evaluate(piece: slice, policy: Tensor, entropy: Tensor | None) -> Tensor:
            given = {name: value if value is None else value[piece] for name, value in others.items()}
            out = part(policy, old_logprobs[piece], advantages[piece], mask[piece], entropy=entropy, **given, **own)
            statistics.append(out.statistics)
            return out.loss

        loss = sum_over_chunks(evaluate, rows, policy_logprobs, optional["entropy"])
        total = sum(statistics[1:], start=statistics[0])
        return ObjectiveOutput(loss, total.metrics(), total)

    def token_weights(
        self,
        policy_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        *,
        cu_seqlens: Tensor | None = None,
        reduce: Reduce | None = None,
    ) -> Tensor:
        """The weight w_t of each token in its response's gradient: [B, T] (or [N]), detached, zero off the mask.

        grad J_i = A_i s_i sum_t w_t grad log pi_t, up to the objective's length weighting; w = 1 at pi = pi_old. For
        SSPO it is the gate's w; each formula's docstring says what it is. Arguments as for the call.
        """
        inputs = self._inputs(policy_logprobs.detach(), old_logprobs, advantages, mask, cu_seqlens, reduce)
        return inputs.layout.select(self.formula(inputs).token_weight.detach())

    def weight_curve(self, log_ratio: Tensor, sign: int = 1) -> Tensor:
        """The w of one-token responses with these log-ratios and an advantage of that sign, for plots: [N] -> [N]."""
        tokens = log_ratio.detach().reshape(-1, 1)
        advantages = torch.full_like(tokens[:, 0], float(sign))
        weights = self.token_weights(tokens, torch.zeros_like(tokens), advantages, torch.ones_like(tokens))
        return weights.reshape(log_ratio.shape)

    def _inputs(
        self,
        policy_logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        cu_seqlens: Tensor | None,
        reduce: Reduce | None,
        optional: Mapping[str, Tensor | None] | None = None,
    ) -> Inputs:
        """Checks the arguments and cleans them of everything off the mask."""
        tokens = {"policy_logprobs": policy_logprobs, "old_logprobs": old_logprobs, **(optional or {})}
        check_shapes({**tokens, "mask": mask}, advantages, cu_seqlens)
        dtype = compute_dtype(policy_logprobs.dtype, old_logprobs.dtype)
        layout = make_layout(mask, advantages.numel(), dtype, cu_seqlens, reduce)
        if self.check_finite:
            check_values(tokens, advantages, mask, cu_seqlens, layout)
        policy = layout.select(policy_logprobs)
        advantages = advantages.detach().to(dtype)
        return Inputs(
            policy_logprobs=policy,
            log_ratio=policy - layout.select(old_logprobs.detach()),
            advantages=advantages,
            token_advantages=layout.spread(advantages),
            layout=layout,
        )

    def _mean(
        self, values: Tensor, layout: Layout, num_responses: float | Tensor | None, num_tokens: float | Tensor | None
    ) -> Tensor:
        """[tokens] -> scalar: the objective's own mean, over the global batch's counts."""
        if self.mean == "token_mean":
            return layout.total(values) / _denominator("num_tokens", num_tokens, layout.lengths.sum())
        responses = _denominator("num_responses", num_responses, layout.lengths.new_full((), layout.lengths.numel()))
        if self.mean == "token_sum":
            return layout.total(values) / (responses * self.length_scale)
        return layout.total(values * layout.share()) / responses


def _denominator(name: str, given: float | Tensor | None, own: Tensor) -> Tensor:
    """The global count, or this batch's own; at least 1, so that an empty batch gives zero and not nan."""
    if given is None:
        return own.clamp(min=1)
    if isinstance(given, Tensor):
        return given.detach().to(own.device, own.dtype).clamp(min=1)
    if not given > 0:
        raise ValueError(f"{name}: {given!r} given; it counts the whole global batch and must be above 0.")
    return own.new_full((), given)


def _with_scaled_gradient(inputs: Inputs, weight: Tensor) -> Inputs:
    """The same numbers, with the gradient of each token multiplied by its weight."""
    return replace(
        inputs,
        policy_logprobs=scale_gradient(inputs.policy_logprobs, weight),
        log_ratio=scale_gradient(inputs.log_ratio, weight),
    )


def _check_given(option: str, needed: bool, argument: str, value: Tensor | None) -> None:
    if needed and value is None:
        raise ValueError(f"{argument} is missing: {key(option)} needs it.")
