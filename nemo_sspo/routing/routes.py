"""How routes are kept: one tensor ``[tokens, L, K]`` a response, a byte an expert where that is enough."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_sspo.parallel.reductions import Group, all_gather_rows


@dataclass(frozen=True)
class RouteFormat:
    """The routes of one model: which of its layers have experts, how many, and how many a token takes.

    `layers` are global layer numbers from 1, ascending, without those of multi-token prediction. In storage a token
    without a route has `missing` for every one of its K experts, which no route has: its experts are distinct.
    """

    layers: tuple[int, ...]
    num_experts: int
    topk: int

    @classmethod
    def of(cls, config: Any) -> RouteFormat:
        """Of a model with this Megatron-Core ``TransformerConfig``."""
        frequency = config.moe_layer_freq
        pattern = (
            [int(i % frequency == 0) for i in range(config.num_layers)] if isinstance(frequency, int) else frequency
        )
        layers = tuple(number for number, is_moe in enumerate(pattern, start=1) if is_moe)
        return cls(layers, config.num_moe_experts, config.moe_router_topk)

    @property
    def dtype(self) -> torch.dtype:
        """uint8 up to 256 experts, else int16. (A single expert of 256 leaves uint8 no value for `missing`.)"""
        fits = self.num_experts <= 256 - (self.topk == 1)
        return torch.uint8 if fits else torch.int16

    @property
    def missing(self) -> int:
        """What stands in storage for each expert of a token without a route."""
        return 255 if self.dtype == torch.uint8 else -1

    @property
    def bytes_per_token(self) -> int:
        """Of storage."""
        return len(self.layers) * self.topk * self.dtype.itemsize

    def pack(self, ids: Tensor, owner: str) -> Tensor:
        """Expert ids ``[tokens, L, K]``, -1 for all K where there is no route, in the storage type and on the CPU.

        Raises:
            ValueError: another shape or type, an id out of range, or the same expert twice for one token; it names
                `owner` (who made them), the token, the layer and the ids.
        """
        expected = (len(self.layers), self.topk)
        if ids.dim() != 3 or tuple(ids.shape[1:]) != expected or ids.is_floating_point():
            raise ValueError(
                f"routes of {owner}: got {tuple(ids.shape)} {ids.dtype}, expected whole numbers [tokens, "
                f"{expected[0]} MoE layers, {expected[1]} experts]"
            )
        ids = ids.detach().to("cpu", torch.int64)
        none = (ids == -1).all(-1)
        ordered = ids.sort(dim=-1).values
        wrong = (ids < 0).any(-1) | (ids >= self.num_experts).any(-1) | (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        bad = (wrong & ~none).nonzero()
        if len(bad):
            token, layer = bad[0].tolist()
            raise ValueError(
                f"routes of {owner}: {len(bad)} (token, layer) pairs can't be, first token {token} in layer "
                f"{self.layers[layer]} with experts {ids[token, layer].tolist()}; allowed: {self.topk} distinct ids "
                f"from 0 to {self.num_experts - 1}, or all -1 for a token without a route"
            )
        return ids.masked_fill(none[..., None], self.missing).to(self.dtype)

    def has_route(self, routes: Tensor) -> Tensor:
        """Storage ``[..., K]`` -> bool ``[...]``."""
        return (routes != self.missing).any(-1)


def gather_routes(local: Sequence[Tensor], group: Group) -> list[Tensor]:
    """The routes of every rank's responses, in rank order. A collective; every rank has at least one response.

    They travel as bytes: gloo and NCCL lack 16-bit integers.
    """
    if group.size() == 1:
        return list(local)
    rows = torch.cat(list(local))
    counts = all_gather_rows(torch.tensor([len(routes) for routes in local]), group).tolist()
    everyone = all_gather_rows(to_bytes(rows), group).cpu()
    return list(from_bytes(everyone, rows.dtype).split(counts))


def to_bytes(routes: Tensor) -> Tensor:
    """The same memory as uint8, ``[..., K * itemsize]``."""
    return routes.contiguous().view(torch.uint8)


def from_bytes(data: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_bytes` made, as it was."""
    return data.contiguous().view(dtype)


def load_imbalance(routes: Sequence[Tensor], form: RouteFormat) -> float:
    """Tokens of the busiest expert over the mean of all experts, averaged over layers; 1 is even."""
    rows = torch.cat(list(routes))
    ratios = []
    for place in range(len(form.layers)):
        ids = rows[:, place]
        loads = torch.bincount(ids[form.has_route(ids)].flatten().long(), minlength=form.num_experts)
        ratios.append(float(loads.max()) * form.num_experts / max(int(loads.sum()), 1))
    return sum(ratios) / len(ratios)
