"""The layers of one pipeline stage, out of Megatron-Core's own modules or Transformer Engine's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig

from nemo_sspo.model import transformer_engine


class RMSNorm(torch.nn.RMSNorm):
    """PyTorch's RMSNorm, whose weight says that its gradient is a part under sequence parallelism.

    Megatron-Core's own wrapper of it (`torch_norm.py`) refuses sequence parallelism, for the lack of that mark alone.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def stage_layers(config: TransformerConfig, vp_stage: int | None, pp_rank: int) -> TransformerBlockSubmodules:
    """The submodules of the stage `pp_rank`, or of its part `vp_stage`."""
    fused = config.transformer_impl == "transformer_engine"
    layer = transformer_engine.layer_spec(config) if fused else _local_layer(config)
    norm: Any = transformer_engine.NORM if fused else RMSNorm
    count = get_num_layers_to_build(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(layer_specs=[layer] * count, layer_norm=norm)


def _local_layer(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    parts: Any = layer.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    if config.qk_layernorm:
        parts.self_attention.submodules.q_layernorm = parts.self_attention.submodules.k_layernorm = RMSNorm
    return layer


def mark_experts(chunks: Sequence[GPTModel], groups: ProcessGroupCollection) -> None:
    """Say which parameters are reduced over the experts' data-parallel ranks instead of everyone's.

    Megatron-Core 0.16.1 marks experts so only with expert parallelism (`ColumnParallelLinear`: ``allreduce``). Without
    it, but with tensor parallelism that stops at the experts, each tensor-parallel rank holds all experts and sees a
    part of the tokens, and their gradients would never be added up.
    """
    own_ranks = groups.ep.size() > 1 or groups.expt_tp.size() != groups.tp.size()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".experts." in name:
                parameter.allreduce = not own_ranks  # type: ignore[attr-defined]
