"""Which part of which Hugging Face tensor a weight is: by global name and offset, so the same under every layout.

The project's own mapping. `mbridge`, which has one for the same models, was looked at first (0.15.1): it names weights
after Transformer Engine's fused and grouped modules, reads whole tensors on the first tensor-parallel rank and scatters
them, gathers through Megatron-Core's global groups on CUDA, and takes the expert's number from the end of a name that
local layers don't have. Here a rank reads its own slices only, and one table serves loading, export and refit.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple, cast

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.transformer.transformer_config import TransformerConfig

_TOP = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_IN_LAYER = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
_FEED_FORWARD = {
    "linear_fc1.weight_w": "gate_proj.weight",
    "linear_fc1.weight_v": "up_proj.weight",
    "linear_fc2.weight": "down_proj.weight",
}
_IN_MLP = re.compile(r"mlp\.(?:experts\.experts\.(\d+)\.)?(linear_fc\d\.weight\w*)")
_QKV = re.compile(r"self_attention\.linear_qkv\.(weight|bias)")

Slices = tuple[slice, ...]


class Piece(NamedTuple):
    """A part of a weight on this rank that is one part of a Hugging Face tensor."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]  # of the whole tensor there
    there: Slices
    here: Slices


def pieces(shard: ShardedTensor, config: TransformerConfig, vocab_size: int) -> Iterator[Piece]:
    """The pieces of a shard, in the order of its rows. Padding rows of the vocabulary are in none.

    Raises:
        KeyError: a weight that has no counterpart.
    """
    shape = cast("tuple[int, ...]", shard.global_shape)
    where = cast(Slices, shard.global_slice())
    here = tuple(slice(0, part.stop - part.start) for part in where)
    if shard.key in _TOP:
        rows = shape[0] if "layernorm" in shard.key else min(shape[0], vocab_size)
        stop = min(where[0].stop, rows)
        if stop > where[0].start:
            there = (slice(where[0].start, stop), *where[1:])
            yield Piece(_TOP[shard.key], (rows, *shape[1:]), there, (slice(0, stop - where[0].start), *here[1:]))
        return
    match = _LAYER.fullmatch(shard.key)
    if match is None:
        raise KeyError(shard.key)
    prefix, name = f"model.layers.{match[1]}.", match[2]
    if qkv := _QKV.fullmatch(name):
        yield from _qkv_pieces(f"{prefix}self_attn.", qkv[1], shape, where, config)
    elif mlp := _IN_MLP.fullmatch(name):
        expert = "" if mlp[1] is None else f"experts.{mlp[1]}."
        yield Piece(f"{prefix}mlp.{expert}{_FEED_FORWARD[mlp[2]]}", shape, where, here)
    else:
        yield Piece(prefix + _IN_LAYER[name], shape, where, here)


def _qkv_pieces(
    prefix: str, kind: str, shape: tuple[int, ...], where: Slices, config: TransformerConfig
) -> Iterator[Piece]:
    """Megatron-Core's rows are, for each query group: the heads of its queries, then its key, then its value."""
    groups, size = config.num_query_groups, config.kv_channels
    assert groups is not None
    assert size is not None
    queries = config.num_attention_heads // groups * size
    for group in range(groups):
        start = group * (queries + 2 * size)
        for name, length in (("q", queries), ("k", size), ("v", size)):
            low, high = max(start, where[0].start), min(start + length, where[0].stop)
            if low < high:
                there, first = group * length - start, where[0].start
                yield Piece(
                    f"{prefix}{name}_proj.{kind}",
                    (groups * length, *shape[1:]),
                    (slice(low + there, high + there), *where[1:]),
                    (slice(low - first, high - first), *(slice(0, part.stop - part.start) for part in where[1:])),
                )
            start += length
