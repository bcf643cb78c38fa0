"""Metrics as sums, so that they do not depend on how a batch is cut: no mean of means."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_sspo.objective.gates import bounded_exp

if TYPE_CHECKING:
    from nemo_sspo.objective.types import Inputs, Surrogate


@dataclass(frozen=True)
class Statistics:
    """Detached sums and maxima that add up over micro-batches, context shards and ranks.

    sums: by metric. `<name>/std` holds [sum x^2, sum x, n], `effective_sample_size` holds [sum g^2, sum g, n], every
    other metric is a mean and holds [sum, n].
    maxima: by metric, scalars of values that are never negative (0 stands for "no tokens").
    """

    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]

    def __add__(self, other: Statistics) -> Statistics:
        """The statistics of both batches together; both must come from the same objective."""
        return Statistics(
            {name: value + other.sums[name] for name, value in self.sums.items()},
            {name: torch.maximum(value, other.maxima[name]) for name, value in self.maxima.items()},
        )

    def reduce(self, sum_: Callable[[Tensor], Tensor], max_: Callable[[Tensor], Tensor]) -> Statistics:
        """The statistics over all ranks: `sum_` and `max_` each reduce one flat tensor."""
        sizes = [value.numel() for value in self.sums.values()]
        sums = sum_(torch.cat(list(self.sums.values()))).split(sizes)
        maxima = max_(torch.stack(list(self.maxima.values()))).unbind()
        return Statistics(dict(zip(self.sums, sums, strict=True)), dict(zip(self.maxima, maxima, strict=True)))

    def metrics(self) -> dict[str, Tensor]:
        """Scalars by name; zero where there was nothing to average."""
        return {name: _finish(name, value) for name, value in self.sums.items()} | self.maxima


def _finish(name: str, value: Tensor) -> Tensor:
    count = value[-1]
    moments = value / torch.where(count > 0, count, 1.0)
    if name.endswith("/std"):
        return (moments[0] - moments[1].square()).clamp(min=0).sqrt()
    if name == "effective_sample_size":
        return moments[1].square() / torch.where(moments[0] > 0, moments[0], 1.0)
    return moments[0]


@torch.no_grad()
def measure(inputs: Inputs, surrogate: Surrogate, extras: Mapping[str, Tensor]) -> Statistics:
    """The statistics that every objective reports.

    Over response tokens: `ratio/mean`, `ratio/max`, `log_ratio/std`, `gate_weight/mean` (w_t),
    `gate_weight/attenuated_fraction`. Over responses with tokens: `sequence_weight/mean`, `sequence_weight/max` (s_i)
    and `effective_sample_size`, (sum g)^2 / (n sum g^2) in (0, 1] with g_i = s_i * mean_t w_t the response's weight in
    the gradient. With the suffix `/positive` or `/negative`: over responses with such advantages.
    extras: by name, [tokens]; means over tokens, or over responses if the name ends in `_response_fraction`, or maxima
    if it ends in `/max`.
    """
    layout, x = inputs.layout, inputs.log_ratio.detach()
    share, ones = layout.share(), torch.ones_like(x)

    def mean(values: Tensor, among: Tensor) -> Tensor:
        return torch.stack([layout.total(values * among), layout.total(among)])

    def largest(values: Tensor) -> Tensor:
        return layout.select(values).amax() if values.numel() else x.new_zeros(())

    ratio, token_weight, attenuated = bounded_exp(x), surrogate.token_weight, surrogate.attenuated.to(x.dtype)
    sequence_weight = layout.spread(surrogate.sequence_weight)
    gradient_weight = sequence_weight * layout.spread(layout.response_mean(token_weight))
    sums = {
        "ratio/mean": mean(ratio, ones),
        "log_ratio/std": torch.cat([layout.total(x.square())[None], mean(x, ones)]),
        "effective_sample_size": torch.cat(
            [layout.total(gradient_weight.square() * share)[None], mean(gradient_weight, share)]
        ),
    }
    positive, negative = (inputs.token_advantages > 0).to(x.dtype), (inputs.token_advantages < 0).to(x.dtype)
    for suffix, among in (("", ones), ("/positive", positive), ("/negative", negative)):
        sums[f"gate_weight/mean{suffix}"] = mean(token_weight, among)
        sums[f"gate_weight/attenuated_fraction{suffix}"] = mean(attenuated, among)
        sums[f"sequence_weight/mean{suffix}"] = mean(sequence_weight, share * among)
    maxima = {"ratio/max": largest(ratio), "sequence_weight/max": largest(sequence_weight)}
    for name, values in extras.items():
        if name.endswith("/max"):
            maxima[name] = largest(values)
        else:
            sums[name] = mean(values.to(x.dtype), share if name.endswith("_response_fraction") else ones)
    return Statistics(sums, maxima)
