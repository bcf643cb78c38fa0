"""Checks of an objective's inputs: shapes always, values in one fused test that costs one wait for the device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from nemo_sspo.objective.layout import Layout


def check_shapes(tokens: dict[str, Tensor | None], advantages: Tensor, cu_seqlens: Tensor | None = None) -> None:
    """Raises ValueError, with both shapes, unless all tensors in `tokens` agree with each other and with advantages.

    tokens: by argument name, policy_logprobs first; each [B, T], or [N] with cu_seqlens [B + 1]. advantages: [B].
    """
    first, reference = next((name, value) for name, value in tokens.items() if value is not None)
    dims, letters = (2, "[B, T]") if cu_seqlens is None else (1, "[N] (with cu_seqlens)")
    if reference.dim() != dims:
        raise ValueError(f"{first} has shape {tuple(reference.shape)}; it must be {letters}.")
    for name, value in tokens.items():
        if value is not None and value.shape != reference.shape:
            raise ValueError(
                f"{name} has shape {tuple(value.shape)}, {first} has {tuple(reference.shape)}: they must be the same."
            )
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1 or cu_seqlens.is_floating_point()):
        raise ValueError(
            f"cu_seqlens is {cu_seqlens.dtype} of shape {tuple(cu_seqlens.shape)}; it must be integers [B + 1]."
        )
    rows = reference.shape[0] if cu_seqlens is None else cu_seqlens.numel() - 1
    if advantages.shape != (rows,):
        other, shape = (first, reference.shape) if cu_seqlens is None else ("cu_seqlens", cu_seqlens.shape)
        raise ValueError(
            f"advantages has shape {tuple(advantages.shape)}, {other} has {tuple(shape)}: "
            f"advantages must be ({rows},), one per response."
        )


def check_values(
    tokens: dict[str, Tensor | None], advantages: Tensor, mask: Tensor, cu_seqlens: Tensor | None, layout: Layout
) -> None:
    """Raises ValueError for non-finite values under the mask, a mask other than 0 and 1, or cu_seqlens out of order.

    The message counts the bad values of the first bad argument and gives the (row, token) of the first of them. With a
    layout that is sharded, every rank of the shard group raises together, so that none waits for the others for ever.
    """
    bad = {name: layout.mask & ~_finite(value) for name, value in tokens.items() if value is not None}
    bad["advantages"] = ~_finite(advantages)
    if mask.dtype != torch.bool:
        bad["mask"] = (mask != 0) & (mask != 1)
    if cu_seqlens is not None:
        beyond = (layout.mask & (layout.rows == advantages.numel())).any()[None].to(cu_seqlens.device)
        too_long = cu_seqlens[-1:] > mask.numel()
        bad["cu_seqlens"] = torch.cat([cu_seqlens[:1] != 0, cu_seqlens.diff() < 0, too_long, beyond])
    flags = torch.stack([flag.any().to(layout.mask.device) for flag in bad.values()])
    any_here = flags.any()
    any_at_all = any_here if layout.reduce is None else layout.reduce(any_here.float()) > 0
    if not bool(any_at_all):
        return
    given = {**tokens, "advantages": advantages, "mask": mask, "cu_seqlens": cu_seqlens}
    for name, flag in bad.items():
        if bool(flag.any()):
            raise ValueError(_describe(name, flag, given[name], cu_seqlens))
    raise ValueError("Another context-parallel rank was given non-finite values; its message says which.")


def _finite(values: Tensor) -> Tensor:
    """`torch.isfinite` without its copy of the values."""
    return (values < math.inf) & (values > -math.inf)


def _describe(name: str, bad: Tensor, values: Tensor | None, cu_seqlens: Tensor | None) -> str:
    assert values is not None
    count, first = int(bad.sum()), bad.nonzero()[0].tolist()
    if name == "cu_seqlens":
        return (
            f"cu_seqlens is {values.tolist()}: it must start at 0, never fall, end at or before the last token, "
            "and leave no token under the mask behind its end."
        )
    value = values[tuple(first)].tolist()
    if name == "advantages":
        return f"advantages: {count} non-finite values, the first at row {first[0]}: {value}."
    if cu_seqlens is not None:
        row = int(torch.bucketize(bad.nonzero()[0].cpu(), cu_seqlens[1:].cpu(), right=True))
        start = int(cu_seqlens[row]) if row < cu_seqlens.numel() else 0
        first = [row, first[0] - start]
    place = f"the first at (row, token) ({first[0]}, {first[1]}): {value}"
    if name == "mask":
        return f"mask: {count} values other than 0 and 1, {place}."
    return f"{name}: {count} non-finite values under the mask, {place}."
