"""Where a response's tokens lie: one abstraction for padded rows, packed rows and context-parallel shards.

Objectives need two moves only: sum a token's value over its response, [tokens] -> [B], and spread a response's value
over its tokens, [B] -> [tokens]. "[tokens]" below is [B, T] when padded and [N] when packed. With a `reduce`, a
response's tokens may lie on several ranks: the sum then covers all of them, and everything else stays local.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

Reduce = Callable[[Tensor], Tensor]
"""Sums a tensor over the ranks that share these responses. It must be differentiable with its true adjoint, which sums
the gradients as well (as `torch.distributed.nn.functional.all_reduce` does): the quantity that is minimised is the sum
of the ranks' losses."""


@dataclass(frozen=True)
class Layout:
    """The response tokens of one micro-batch.

    mask: [tokens] bool, True on response tokens that lie here.
    lengths: [B] response tokens of each response over all its shards, in the dtype of the computation.
    rows: [N] row of each packed token (B for tokens behind the last row), or None when padded.
    reduce: sums over the shards, or None when every response lies here whole.
    """

    mask: Tensor
    lengths: Tensor
    rows: Tensor | None = None
    reduce: Reduce | None = None

    def select(self, values: Tensor) -> Tensor:
        """[tokens] -> [tokens] in the dtype of the computation, exact zeros (also in the gradient) off the mask."""
        return torch.where(self.mask, values.to(self.lengths.dtype), 0.0)

    def total(self, values: Tensor) -> Tensor:
        """[tokens] -> scalar: the sum over the response tokens that lie here; totals add up over shards and batches."""
        return self.select(values).sum()

    def response_sum(self, values: Tensor) -> Tensor:
        """[tokens] -> [B]: the sum over each response's tokens, on all shards."""
        local = _sum_rows(self.select(values), self.rows, self.lengths.numel())
        return local if self.reduce is None else self.reduce(local)

    def response_mean(self, values: Tensor) -> Tensor:
        """[tokens] -> [B]: the mean over each response's tokens, on all shards; zero for a response without tokens."""
        return self.response_sum(values) / self.lengths.clamp(min=1)

    def spread(self, values: Tensor) -> Tensor:
        """[B] -> [tokens]: each token gets its response's value."""
        if self.rows is None:
            return values[:, None].expand(self.mask.shape)
        return pad(values, (0, 1))[self.rows]

    def share(self) -> Tensor:
        """[tokens]: each token's share of its response, 1 / length; they add up to 1 over a response with tokens."""
        return self.spread(1 / self.lengths.clamp(min=1))


def make_layout(
    mask: Tensor,
    num_rows: int,
    dtype: torch.dtype,
    cu_seqlens: Tensor | None = None,
    reduce: Reduce | None = None,
) -> Layout:
    """The layout of a mask: [B, T], or [N] with `cu_seqlens` [B + 1] (row b is tokens cu_seqlens[b]:cu_seqlens[b + 1]).

    Nothing here waits for the device or depends on values. Shapes are checked by the caller (`Objective`).
    """
    mask = mask.bool()
    rows = None
    if cu_seqlens is not None:
        positions = torch.arange(mask.numel(), device=mask.device)
        rows = torch.bucketize(positions, cu_seqlens[1:].to(mask.device, torch.int64), right=True)
    lengths = _sum_rows(mask.to(dtype), rows, num_rows)
    return Layout(mask, lengths if reduce is None else reduce(lengths), rows, reduce)


def _sum_rows(values: Tensor, rows: Tensor | None, num_rows: int) -> Tensor:
    if rows is None:
        return values.sum(1)
    return values.new_zeros(num_rows + 1).index_add(0, rows, values)[:num_rows]
