"""Weights by their global names: Megatron-Core's own description of which part of what a rank holds.

A name, a global shape and an offset (`ShardedTensor`) mean the same under every layout. Checkpoints are written by
them, and fresh weights are drawn by them, so that a model starts from the same numbers however it is cut.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.utils import extract_sharded_tensors_and_factories
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_sspo.errors import some
from nemo_sspo.seeds import sample_seed

EXTRA_STATE = "_extra_state"  # in the names of what a layer keeps beside its weights


def sharded_weights(chunks: Sequence[GPTModel], groups: ProcessGroupCollection) -> dict[str, Any]:
    """Megatron-Core's sharded state dict of this rank's model chunks; it holds the parameters themselves.

    Layers and experts have names of their own (``decoder.layers.3.mlp.experts.experts.7.linear_fc1.weight``), and the
    two halves of a gated first layer are shards of two (``..._w`` the gate, ``..._v`` the up projection). FP8's scales
    are left out: other layers than Transformer Engine's have none.
    """
    metadata = {"singleton_local_shards": True, "dp_cp_group": groups.dp_cp}
    return {
        f"model{i}": {k: v for k, v in chunk.sharded_state_dict(metadata=metadata).items() if EXTRA_STATE not in k}
        for i, chunk in enumerate(chunks)
    }


def put_weights(chunks: Sequence[GPTModel], loaded: dict[str, Any]) -> None:
    """Put what `sharded_weights` described, loaded, into the chunks.

    Raises:
        KeyError: a weight without a counterpart, here or there.
    """
    for i, chunk in enumerate(chunks):
        different = chain(*chunk.load_state_dict(loaded[f"model{i}"], strict=False))
        wrong = [name for name in different if EXTRA_STATE not in name]
        if wrong:
            raise KeyError(f"weights without a counterpart: {some(wrong)}")


def shards(sharded_state_dict: dict[str, Any]) -> Iterator[ShardedTensor]:
    """The shards in a sharded state dict. Writing to a shard's ``data`` writes to the tensor it is a part of."""
    sharded, _ = extract_sharded_tensors_and_factories(sharded_state_dict)
    for value in nested_values(sharded):
        if isinstance(value, ShardedTensorFactory):
            yield from nested_values({"parts": value.build()})
        else:
            yield value


def draw_weights(chunks: Sequence[GPTModel], groups: ProcessGroupCollection, seed: int) -> None:
    """Fresh weights, each drawn whole from ``(seed, name)`` and cut to what this rank holds.

    Normal with ``init_method_std``, over ``sqrt(2 L)`` for the projections back into the residual stream, as
    Megatron-Core does it; norms are 1, biases 0.
    """
    config = chunks[0].config
    with torch.no_grad():
        for shard in shards(sharded_weights(chunks, groups)):
            weight = shard.data
            assert weight is not None
            if weight.dim() == 1:
                weight.fill_(0.0 if shard.key.endswith(".bias") else 1.0)
                continue
            back = any(name in shard.key for name in ("linear_proj", "linear_fc2"))
            initialise = config.output_layer_init_method if back else config.init_method
            assert initialise is not None
            whole = torch.empty(shard.global_shape)
            initialise(whole, generator=torch.Generator().manual_seed(sample_seed(seed, "weights", shard.key)))
            weight.copy_(whole[shard.global_slice()])
