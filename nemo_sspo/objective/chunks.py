"""Large padded batches, a few rows at a time, so that an objective's intermediate tensors exist for those rows only.

A loss is a sum over rows with global denominators, so its gradient can be made row by row together with it. That is
done in the forward pass; the backward pass only scales it. Above its inputs a batch then needs its gradient and the
intermediates of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_TOKENS = 2**17
"""Tokens worked on at a time: 128 Ki of them, some 7 MiB of intermediates."""

Evaluate = Callable[[slice, Tensor, Tensor | None], Tensor]
"""(rows, policy_logprobs of those rows, entropy of those rows) -> their share of the loss."""


def chunk_rows(mask: Tensor) -> int:
    """Rows in a chunk of a padded [B, T] batch; 0: the batch is small, or being compiled, and stays whole."""
    if mask.numel() <= CHUNK_TOKENS or mask.shape[0] < 2 or torch.compiler.is_compiling():
        return 0
    return max(1, CHUNK_TOKENS // mask.shape[1])


def sum_over_chunks(evaluate: Evaluate, rows: int, policy_logprobs: Tensor, entropy: Tensor | None) -> Tensor:
    """The sum of `evaluate` over chunks of `rows` rows: a scalar.

    policy_logprobs, entropy: [B, T]. Gradient: to both, once: the first backward pass scales the kept gradient in
    place and hands it over, and a second one raises RuntimeError.
    """
    if not torch.is_grad_enabled():  # needs_input_grad would say nothing of it
        policy_logprobs, entropy = policy_logprobs.detach(), None if entropy is None else entropy.detach()
    return _RowChunks.apply(evaluate, rows, policy_logprobs, entropy)  # type: ignore[return-value]


class _RowChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, evaluate: Evaluate, rows: int, policy: Tensor, entropy: Tensor | None) -> Tensor:
        given = {"policy": policy, "entropy": entropy}
        wanted = [n for n, needed in zip(given, ctx.needs_input_grad[2:], strict=True) if needed]
        ctx.gradients = {name: torch.empty_like(given[name]) for name in wanted}
        shares = []
        for start in range(0, policy.shape[0], rows):
            piece = slice(start, start + rows)
            with torch.set_grad_enabled(bool(wanted)):
                own = {
                    n: None if t is None else t[piece].detach().requires_grad_(n in wanted) for n, t in given.items()
                }
                share = evaluate(piece, own["policy"], own["entropy"])  # type: ignore[arg-type]
                leaves: Any = [own[name] for name in wanted]
                found = torch.autograd.grad(share, leaves, allow_unused=True) if share.requires_grad else ()
            for name, gradient in zip(wanted, found or [None] * len(wanted), strict=True):
                ctx.gradients[name][piece] = 0.0 if gradient is None else gradient
            shares.append(share.detach())
        return torch.stack(shares).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *output_gradients: Tensor) -> tuple[Tensor | None, ...]:
        # Not saved_tensors, which would stay alive and make the leaf copy what it could take over.
        gradients, ctx.gradients = ctx.gradients, None
        if gradients is None:
            raise RuntimeError(
                "The gradient of this loss was made with it and is used up; evaluate the objective again."
            )
        scaled = [gradients.pop(name).mul_(output_gradients[0]) if name in gradients else None for name in _NAMES]
        return None, None, *scaled


_NAMES = ("policy", "entropy")
