"""Log-probs and entropy of sampled tokens over a vocabulary that may be split across ranks.

Two entrances, one arithmetic: :func:`vocab_parallel_logprobs` for hosts that hand over logits, and
:func:`linear_logprobs`, which starts at the hidden states and never holds the logits of a whole batch.

Both walk over the vocabulary in tiles and keep, for every token, three running numbers: the peak ``m`` of its
logits ``l``, ``S = sum exp(l - m)`` and ``P = sum exp(l - m) (l - m)``. Then::

    logprob = l[target] - m - log S            d logprob / d l_j = [j = target] - p_j
    entropy = log S - P / S                    d entropy / d l_j = -p_j (log p_j + entropy)

Tiles and tensor-parallel ranks are joined by the same rule: move all to the larger peak, then add. Walking over
vocabulary rather than over tokens makes each tile's weight gradient final at once, so that bfloat16 weights need no
float32 copy of their gradient, and it costs two all-reduces a call however many tiles there are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""The target of padding: log-prob 0, entropy 0, no gradient."""

_TILE_SIZE = 2**24  # logits in a tile where nobody asks for another size: 64 MiB in float32
_LOWEST_LOG = -1e4  # instead of log 0 = -inf, whose product with a probability of 0 has to be 0
_MM_HAS_OUT_DTYPE = "dtype" in torch.ops.aten.mm.overloads()  # torch >= 2.8


def vocab_parallel_logprobs(
    logits: Tensor, targets: Tensor, tp_group: dist.ProcessGroup | None = None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probs of ``targets`` and the entropy of the whole distribution, from logits.

    Args:
        logits: [..., V/tp], this rank's equal share of the vocabulary, in rank order. ``-inf`` masks an entry.
        targets: [...], integer ids in [0, V), the same on every rank of ``tp_group``, or :data:`IGNORE_INDEX`.
        tp_group: tensor-parallel group; None: the vocabulary is whole.
        temperature: divides the logits.

    Returns:
        logprobs [...] and entropy [...] in nats, float32 (float64 for float64 logits), the same on every rank.

    Gradient: of both outputs, in the logits (their dtype), once. It is that of this rank's shard, for output
    gradients that are the same on every rank. Only the logits themselves are kept for the backward pass.

    Raises:
        ValueError: shapes that do not fit, targets that are no integers or outside [0, V), a temperature that is not
            a positive number. The check of the targets waits for the device once.
    """
    if logits.ndim == 0 or logits.shape[:-1] != targets.shape:
        raise ValueError(
            f"targets must have the shape of logits without its last dimension: "
            f"logits {tuple(logits.shape)}, targets {tuple(targets.shape)}"
        )
    vocab = logits.shape[-1]
    _check(targets, vocab, tp_group, temperature)
    flat = logits.reshape(targets.numel(), vocab)
    logprobs, entropy = _LogitsLogprobs.apply(flat, targets.reshape(-1).long(), tp_group, temperature)  # pyright: ignore
    return logprobs.view(targets.shape), entropy.view(targets.shape)


def linear_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    tp_group: dist.ProcessGroup | None = None,
    chunk_size: int | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The same as ``vocab_parallel_logprobs(hidden @ weight.T, ...)`` without ever holding those logits.

    Args:
        hidden: [N, H], all tokens, the same on every rank of ``tp_group``: gather it first under sequence parallelism.
        weight: [V/tp, H], this rank's equal share of the output layer, in rank order; the dtype of ``hidden``.
        targets: [N], integer ids in [0, V), the same on every rank, or :data:`IGNORE_INDEX`.
        tp_group: tensor-parallel group; None: the vocabulary is whole.
        chunk_size: at most this many rows' worth of logits exist at a time, chunk_size * V/tp numbers (and, for the
            entropy, scratch of the same size); None: 2**24, 64 MiB in float32. They are computed as tiles of all
            rows and a part of the vocabulary, again in the backward pass. It changes memory and speed, not results.
        temperature: divides the logits.
        vocab_size: V where the weight has more rows than that, as padding; None: it has none.

    Returns:
        logprobs [N] and entropy [N] in nats, float32 (float64 for float64 inputs), the same on every rank.

    Gradient: of both outputs, in ``hidden`` and ``weight`` (their dtype, accumulated in float32), once. Output
    gradients must be the same on every rank. The gradient of ``hidden`` is summed over ``tp_group`` in here, as
    Megatron's ColumnParallelLinear does, so it is complete on every rank: a gather of sequence-parallel ``hidden``
    must only split it (``tensor_parallel_output_grad=False``).

    Raises:
        ValueError: shapes or dtypes that do not fit, targets that are no integers or outside [0, V), a chunk_size
            below 1, a temperature that is not a positive number. The check of the targets waits for the device once.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            f"hidden must be [N, H] and weight [V, H]: hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}"
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"targets must be [N], one for each row of hidden: "
            f"hidden {tuple(hidden.shape)}, targets {tuple(targets.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden and weight must have one dtype: hidden {hidden.dtype}, weight {weight.dtype}")
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be at least 1, got {chunk_size}")
    _check(targets, weight.shape[0], tp_group, temperature, vocab_size)
    tile_size = _TILE_SIZE if chunk_size is None else chunk_size * weight.shape[0]
    first = _first_id(weight.shape[0], tp_group)
    real = weight.shape[0] if vocab_size is None else min(max(vocab_size - first, 0), weight.shape[0])
    return _LinearLogprobs.apply(hidden, weight, targets.long(), tp_group, tile_size, temperature, real)  # pyright: ignore


class _LogitsLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, tp_group: Any, temperature: float) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.first, ctx.temperature = _first_id(logits.shape[1], tp_group), temperature
        tiles = _logits_tiles(logits, temperature)
        logprobs, entropy, lse = _forward_walk(tiles, targets, ctx.first, tp_group, _accumulation_dtype(logits))
        ctx.save_for_backward(logits, targets, lse, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        logits, targets, lse, entropy = ctx.saved_tensors
        tiles = _logits_tiles(logits, ctx.temperature)
        grad_logits = torch.empty_like(logits)
        for columns, grad in _backward_walk(tiles, targets, ctx.first, ctx.temperature, lse, entropy, *grads):
            grad_logits[:, columns] = grad
        return grad_logits, None, None, None


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        tp_group: Any,
        tile_size: int,
        temperature: float,
        real: int,  # rows of this rank's weight that are no padding
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.first, ctx.temperature = _first_id(weight.shape[0], tp_group), temperature
        ctx.tp_group, ctx.tile_size, ctx.real = tp_group, tile_size, real
        tiles = _linear_tiles(_operand(hidden), weight, tile_size, temperature, real)
        logprobs, entropy, lse = _forward_walk(tiles, targets, ctx.first, tp_group, _accumulation_dtype(hidden))
        ctx.save_for_backward(hidden, weight, targets, lse, entropy)
        return logprobs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, targets, lse, entropy = ctx.saved_tensors
        inputs = _operand(hidden)
        tiles = _linear_tiles(inputs, weight, ctx.tile_size, ctx.temperature, ctx.real)
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if ctx.needs_input_grad[0] else None
        grad_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        for columns, grad in _backward_walk(tiles, targets, ctx.first, ctx.temperature, lse, entropy, *grads):
            grad = grad.to(inputs.dtype)
            if grad_hidden is not None:
                _matmul(grad, _operand(weight[columns]), out=grad_hidden, accumulate=True)
            if grad_weight is not None:
                _matmul(grad.T, inputs, out=grad_weight[columns])
        if grad_hidden is not None:
            if ctx.tp_group is not None:
                dist.all_reduce(grad_hidden, group=ctx.tp_group)
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None, None, None


# A tile: which columns of this rank's vocabulary, and their logits [N, width] over the temperature, in the dtype of
# accumulation. It lies in a buffer that the next tile reuses, and whoever takes it may overwrite it.
_Tiles = Iterator[tuple[slice, Tensor]]


def _logits_tiles(logits: Tensor, temperature: float) -> _Tiles:
    rows, vocab = logits.shape
    for columns, tile in _buffers(rows, vocab, _TILE_SIZE // max(rows, 1), logits):
        tile.copy_(logits[:, columns])
        yield columns, tile if temperature == 1.0 else tile.div_(temperature)


def _linear_tiles(inputs: Tensor, weight: Tensor, tile_size: int, temperature: float, real: int) -> _Tiles:
    (rows, hidden), vocab = inputs.shape, weight.shape[0]
    # A tile of the weight, [width, H], is bounded like a tile of logits: it may be converted to float32.
    for columns, tile in _buffers(rows, vocab, tile_size // max(rows, hidden, 1), weight):
        _matmul(inputs, _operand(weight[columns]).T, out=tile)
        tile[:, max(real - columns.start, 0) :] = -math.inf  # rows of padding: no token
        yield columns, tile if temperature == 1.0 else tile.div_(temperature)


def _buffers(rows: int, vocab: int, width: int, like: Tensor) -> _Tiles:
    """Slices of the vocabulary and views of one reused buffer."""
    if width > 128:
        width -= width % 128  # matrix kernels like multiples
    width = min(max(width, 1), vocab)
    buffer = like.new_empty(rows, width, dtype=_accumulation_dtype(like))
    for start in range(0, vocab, width):
        stop = min(start + width, vocab)
        yield slice(start, stop), buffer[:, : stop - start]


def _forward_walk(
    tiles: _Tiles, targets: Tensor, first: int, tp_group: dist.ProcessGroup | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probs, entropy and log-sum-exp [N] over all tiles and ranks; ``first`` is this rank's lowest id."""
    peak = torch.full_like(targets, torch.finfo(dtype).min, dtype=dtype)
    total, weighted, target_logit = torch.zeros((3, *targets.shape), dtype=dtype, device=targets.device)
    scratch = None
    for columns, tile in tiles:
        index, inside = _locate(targets, first, columns)
        target_logit = torch.where(inside, tile.gather(1, index).squeeze(1), target_logit)
        old_peak, peak = peak, torch.maximum(peak, tile.amax(1))
        total, weighted = _move_peak(total, weighted, old_peak - peak)
        tile.sub_(peak.unsqueeze(1))
        scratch = torch.empty_like(tile) if scratch is None else scratch
        exps = torch.exp(tile, out=scratch[:, : tile.shape[1]])
        total += exps.sum(1)
        weighted += exps.mul_(tile.clamp_(min=_LOWEST_LOG)).sum(1)
    if tp_group is not None:
        old_peak, peak = peak, peak.clone()
        dist.all_reduce(peak, dist.ReduceOp.MAX, group=tp_group)
        sums = torch.stack((*_move_peak(total, weighted, old_peak - peak), target_logit))
        dist.all_reduce(sums, group=tp_group)
        total, weighted, target_logit = sums
    log_total = total.log()
    ignored = targets == IGNORE_INDEX
    logprobs = (target_logit - peak - log_total).masked_fill_(ignored, 0.0)
    entropy = (log_total - weighted / total).masked_fill_(ignored, 0.0)
    return logprobs, entropy, peak + log_total


def _backward_walk(
    tiles: _Tiles,
    targets: Tensor,
    first: int,
    temperature: float,
    lse: Tensor,
    entropy: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropy: Tensor | None,
) -> _Tiles:
    """Turns each tile of logits into their gradient, before the division by the temperature, in place."""
    ignored = targets == IGNORE_INDEX
    grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs / temperature
    grad_logprobs = grad_logprobs.masked_fill(ignored, 0.0)
    by_prob = -grad_logprobs  # the factor of p_j, joined by the entropy's
    if grad_entropy is not None:
        grad_entropy = (grad_entropy / temperature).masked_fill(ignored, 0.0)
        by_prob = by_prob - grad_entropy * entropy
    scratch = None
    for columns, tile in tiles:
        tile.sub_(lse.unsqueeze(1))
        if grad_entropy is None:
            tile.exp_().mul_(by_prob.unsqueeze(1))
        else:
            scratch = torch.empty_like(tile) if scratch is None else scratch
            probs = torch.exp(tile, out=scratch[:, : tile.shape[1]])
            # p_j (by_prob - grad_entropy log p_j)
            tile.clamp_(min=_LOWEST_LOG).mul_(-grad_entropy.unsqueeze(1)).add_(by_prob.unsqueeze(1)).mul_(probs)
        index, inside = _locate(targets, first, columns)
        tile.scatter_add_(1, index, torch.where(inside, grad_logprobs, 0.0).unsqueeze(1))
        yield columns, tile


def _move_peak(total: Tensor, weighted: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
    """``S`` and ``P`` of the module's docstring after the peak has grown by ``-shift``."""
    scale = shift.exp()
    return scale * total, scale * (weighted + shift * total)


def _locate(targets: Tensor, first: int, columns: slice) -> tuple[Tensor, Tensor]:
    """Each target's column in a tile, clamped to it [N, 1], and whether it lies there at all [N]."""
    width = columns.stop - columns.start
    index = targets - (first + columns.start)
    return index.clamp(0, width - 1).unsqueeze(1), (index >= 0) & (index < width)


def _matmul(a: Tensor, b: Tensor, out: Tensor, accumulate: bool = False) -> None:
    """``out = a @ b``, or ``out += a @ b``; ``out`` may be of another precision than the operands."""
    if a.dtype == out.dtype:
        torch.addmm(out, a, b, beta=int(accumulate), out=out)
    elif a.is_cuda and out.dtype == torch.float32 and _MM_HAS_OUT_DTYPE:
        # Not addmm: PyTorch 2.8's wants its first operand in half precision.
        product = torch.mm(a, b, out_dtype=out.dtype, out=None if accumulate else out)
        if accumulate:
            out += product
    elif accumulate:
        out += a @ b
    else:
        out.copy_(a @ b)


def _operand(tensor: Tensor) -> Tensor:
    """As matrix products take it: a GPU accumulates half precision in float32 by itself, a CPU rounds the result."""
    return tensor if tensor.is_cuda else tensor.to(_accumulation_dtype(tensor))


def _accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _first_id(vocab: int, tp_group: dist.ProcessGroup | None) -> int:
    return 0 if tp_group is None else dist.get_rank(tp_group) * vocab


def _check(
    targets: Tensor, vocab: int, tp_group: dist.ProcessGroup | None, temperature: float, vocab_size: int | None = None
) -> None:
    """What both entrances ask for; ``vocab`` is this rank's share, ``vocab_size`` what is no padding of all shares."""
    if not (math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a positive number, got {temperature}")
    if targets.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"targets must be int64 or int32 token ids, got {targets.dtype}")
    size = vocab * (1 if tp_group is None else dist.get_world_size(tp_group))
    if vocab_size is not None and not 0 < vocab_size <= size:
        raise ValueError(f"vocab_size must be in [1, {size}], the rows of the weight on all ranks, got {vocab_size}")
    size = size if vocab_size is None else vocab_size
    outside = ((targets < 0) | (targets >= size)) & (targets != IGNORE_INDEX)
    if outside.any():
        position = tuple(outside.nonzero()[0].tolist())
        raise ValueError(
            f"targets must be in [0, {size}) or {IGNORE_INDEX} for padding: "
            f"got {int(targets[position])} at {list(position)}, {int(outside.sum())} such in all"
        )
