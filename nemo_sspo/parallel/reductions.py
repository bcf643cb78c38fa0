"""Collectives on plain tensors and objects. The process group is always an argument."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Group = dist.ProcessGroup


def _device(group: Group) -> torch.device:
    """Where the group's backend wants its tensors."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )


def local_share(rows: int, group: Group) -> slice:
    """The contiguous rows that belong to this rank of `group`; sizes differ by at most one."""
    rank, size = group.rank(), group.size()
    return slice(rows * rank // size, rows * (rank + 1) // size)


def all_reduce(value: Tensor, group: Group, op: Any = dist.ReduceOp.SUM) -> Tensor:
    """A new tensor: `value` reduced over `group`. Not differentiable."""
    reduced = value.detach().clone()
    if group.size() > 1:
        dist.all_reduce(reduced, op=op, group=group)
    return reduced


def sum_over_ranks(value: Tensor, group: Group) -> Tensor:
    """The sum of `value` over `group`, the same on every rank. Differentiable: gradients are summed as well.

    Right where what is minimised is the sum of the ranks' losses, as for an objective whose responses are sharded over
    context-parallel ranks (its argument `reduce`).
    """
    return _SumOverRanks.apply(value, group)  # type: ignore[return-value]


class _SumOverRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return all_reduce(value, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return all_reduce(grads[0], ctx.group), None


def all_gather_rows(local: Tensor, group: Group, pad: float = 0) -> Tensor:
    """Rows of all ranks in rank order. Trailing sizes may differ by rank: they are padded with `pad` to the largest.

    ``[b_r, ...] -> [sum b_r, ...]``, where the group's backend wants it (CPU for gloo). Not differentiable.
    """
    if group.size() == 1:
        return local
    local = local.to(_device(group))
    shape = torch.tensor(local.shape, device=local.device)
    shapes = [torch.empty_like(shape) for _ in range(group.size())]
    dist.all_gather(shapes, shape, group=group)
    largest = torch.stack(shapes).amax(0).tolist()
    padded = local.new_full(largest, pad)
    padded[tuple(slice(n) for n in local.shape)] = local
    parts = [torch.empty_like(padded) for _ in range(group.size())]
    dist.all_gather(parts, padded, group=group)
    return torch.cat([part[: int(s[0])] for part, s in zip(parts, shapes, strict=True)])


def all_gather_list(local: list, group: Group) -> list:
    """Python objects of all ranks, concatenated in rank order."""
    if group.size() == 1:
        return list(local)
    parts: list[Any] = [None] * group.size()
    dist.all_gather_object(parts, local, group=group)
    return [item for part in parts for item in part]


def any_rank(flag: bool, group: Group) -> bool:
    """Whether any rank of `group` says so. A collective: every rank calls it."""
    return bool(all_reduce(torch.tensor(int(flag), device=_device(group)), group, dist.ReduceOp.MAX))
