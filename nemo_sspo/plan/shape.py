"""The parameters that a rank holds, tensor by tensor, in the order in which Megatron-Core's buffers take them.

All numbers are elements. A stage is a pipeline rank; with interleaving it has several model chunks, each with buffers
of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from nemo_sspo.config.schema import ModelConfig
from nemo_sspo.plan.layout import Layout

# What the distributed optimizer aligns in a buffer, in elements (Megatron-Core 0.16.1, param_and_grad_buffer.py):
# each tensor's start, and the buffer's end, which also has to split evenly over the data-parallel ranks.
_START, _END = 64, 128
_MATRICES = ("linear_proj", "linear_qkv", "router", "linear_fc1", "linear_fc2")


class Tensor(NamedTuple):
    """One parameter on one rank."""

    name: str
    size: int
    expert: bool = False


@dataclass(frozen=True)
class Buffer:
    """One gradient buffer: its parameters, its elements with padding, and the largest part of one rank."""

    parameters: int
    padded: int
    largest_part: int  # of the optimizer's state: all parameters, or the fullest of equal parts of the buffer


def padded_vocab_size(model: ModelConfig, vocab_size: int) -> int:
    """The rows of the embedding, over all tensor-parallel ranks."""
    multiple = model.make_vocab_size_divisible_by
    return -(-vocab_size // multiple) * multiple


def parameter_count(model: ModelConfig, vocab_size: int) -> int:
    """How many parameters the whole model has, padding of the vocabulary included."""
    return sum(tensor.size for chunk in stage_tensors(model, vocab_size, Layout(), 0) for tensor in chunk)


def active_parameters(model: ModelConfig, layout: Layout) -> int:
    """Elements of one layer's matrices that a token meets on a rank, as if its experts were all there."""
    one_expert = replace(layout, ep=model.num_moe_experts or 1)
    layer = [tensor for tensor in _layer(model, one_expert) if tensor.name in _MATRICES]
    return sum(tensor.size * ((model.moe_router_topk or 0) if tensor.expert else 1) for tensor in layer)


def expert_parameters(model: ModelConfig, layout: Layout) -> int:
    """Of the experts on a rank, in all layers of its stage."""
    one_expert = _feed_forward(model.hidden_size, (model.moe_ffn_hidden_size or 0) // layout.etp, expert=True)
    return model.num_layers // layout.pp * (model.num_moe_experts or 0) // layout.ep * sum(t.size for t in one_expert)


def stage_tensors(model: ModelConfig, vocab_size: int, layout: Layout, stage: int) -> list[list[Tensor]]:
    """Every model chunk of a pipeline stage."""
    chunks, layers = layout.pp * layout.vpp, model.num_layers // (layout.pp * layout.vpp)
    numbers = [part * layout.pp + stage for part in range(layout.vpp)]
    return [_chunk(model, vocab_size, layout, layers, number == 0, number == chunks - 1) for number in numbers]


def buffers(tensors: Sequence[Tensor], layout: Layout) -> list[Buffer]:
    """The gradient buffers of a model chunk.

    Experts have one of their own where they are split otherwise than the rest, as `nemo_sspo.model.layers.mark_experts`
    says.
    """
    own = layout.ep > 1 or layout.etp != layout.tp
    dense = [tensor.size for tensor in tensors if not (own and tensor.expert)]
    experts = [tensor.size for tensor in tensors if own and tensor.expert]
    groups = [(dense, layout.dp * layout.cp), (experts, layout.expert_dp)]
    return [_buffer(sizes, ranks, layout.distributed_optimizer) for sizes, ranks in groups if sizes]


def _buffer(sizes: list[int], ranks: int, distributed: bool) -> Buffer:
    total = sum(sizes)
    if not distributed:
        return Buffer(total, total, total)
    sizes = sizes[::-1]  # as the backward pass fills it
    starts, end = [], 0
    for size in sizes:
        starts.append(_up(end, _START))
        end = starts[-1] + size
    padded = _up(end, math.lcm(ranks, _END))
    return Buffer(total, padded, _fullest_part(starts, sizes, padded // ranks, ranks))


def _fullest_part(starts: list[int], sizes: list[int], part: int, ranks: int) -> int:
    """The most parameters in one of `ranks` equal parts of a buffer; the rest of it is padding."""
    filled = [0] * ranks
    for start, size in zip(starts, sizes, strict=True):
        while size:
            rank = start // part
            here = min(size, (rank + 1) * part - start)
            filled[rank] += here
            start, size = start + here, size - here
    return max(filled)


def _chunk(model: ModelConfig, vocab_size: int, layout: Layout, layers: int, first: bool, last: bool) -> list[Tensor]:
    table = padded_vocab_size(model, vocab_size) // layout.tp * model.hidden_size
    tensors = [Tensor("embedding", table)] if first else []
    tensors += [tensor for _ in range(layers) for tensor in _layer(model, layout)]
    tensors += [Tensor("final_layernorm", model.hidden_size)] if last else []
    # A tied output layer is a copy of the embedding where that is on another stage.
    own_output = last and not (first and model.share_embeddings_and_output_weights)
    return tensors + ([Tensor("output_layer", table)] if own_output else [])


def _layer(model: ModelConfig, layout: Layout) -> Iterator[Tensor]:
    yield Tensor("input_layernorm", model.hidden_size)
    yield from _attention(model, layout)
    yield Tensor("pre_mlp_layernorm", model.hidden_size)
    if model.num_moe_experts is None:
        yield from _feed_forward(model.hidden_size, (model.ffn_hidden_size or 0) // layout.tp, expert=False)
        return
    yield Tensor("router", model.num_moe_experts * model.hidden_size)
    for _ in range(model.num_moe_experts // layout.ep):
        yield from _feed_forward(model.hidden_size, (model.moe_ffn_hidden_size or 0) // layout.etp, expert=True)


def _attention(model: ModelConfig, layout: Layout) -> Iterator[Tensor]:
    heads, groups = model.num_attention_heads // layout.tp, model.num_query_groups // layout.tp
    yield Tensor("linear_proj", model.hidden_size * heads * model.kv_channels)
    yield Tensor("linear_qkv", (heads + 2 * groups) * model.kv_channels * model.hidden_size)
    if model.add_qkv_bias:
        yield Tensor("linear_qkv_bias", (heads + 2 * groups) * model.kv_channels)
    if model.qk_layernorm:
        yield Tensor("q_layernorm", model.kv_channels)
        yield Tensor("k_layernorm", model.kv_channels)


def _feed_forward(hidden: int, ffn: int, expert: bool) -> Iterator[Tensor]:
    yield Tensor("linear_fc1", 2 * ffn * hidden, expert)  # SwiGLU: gate and value
    yield Tensor("linear_fc2", hidden * ffn, expert)


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
