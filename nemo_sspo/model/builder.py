"""Megatron-Core's own GPTModel in the shape of Qwen3's mixture-of-experts models."""

from __future__ import annotations

from typing import cast

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_sspo.compat import megatron_cpu
from nemo_sspo.config.schema import ModelConfig

_DTYPES = {"32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(model: ModelConfig, precision: str = "32") -> TransformerConfig:
    """Megatron-Core's configuration of one model.

    RMSNorm before attention and experts, q/k norm, grouped-query attention, SwiGLU experts without bias, and a router
    in float32 whose probabilities are the softmax over the chosen experts (Qwen3 Technical Report, arXiv 2505.09388).
    Fused kernels that exist only for CUDA are off: `model.precision` and the layer spec decide those.
    """
    dtype = _DTYPES[precision]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        ffn_hidden_size=model.moe_ffn_hidden_size,
        moe_ffn_hidden_size=model.moe_ffn_hidden_size,
        num_moe_experts=model.num_moe_experts,
        moe_router_topk=model.moe_router_topk,
        moe_router_pre_softmax=False,  # softmax over the chosen experts
        moe_router_dtype="fp32",
        moe_router_load_balancing_type="aux_loss" if model.moe_aux_loss_coeff else "none",
        moe_aux_loss_coeff=model.moe_aux_loss_coeff,
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=False,
        moe_permute_fusion=False,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=model.layernorm_epsilon,
        qk_layernorm=model.qk_layernorm,
        init_method_std=model.init_method_std,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        expert_model_parallel_size=model.expert_model_parallel_size,
        context_parallel_size=model.context_parallel_size,
        sequence_parallel=model.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=not torch.cuda.is_available(),
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
    )


def build_model(model: ModelConfig, vocab_size: int, groups: ProcessGroupCollection, precision: str = "32") -> GPTModel:
    """This rank's part of the policy, with weights drawn from ``model.seed``.

    `vocab_size` is the tokenizer's; the output is the logits ``[B, S, V]`` of every position, split over
    ``groups.tp``. Every data-parallel rank draws the same weights.
    """
    megatron_cpu.install()
    torch.manual_seed(model.seed)
    model_parallel_cuda_manual_seed(
        model.seed,
        tp_rank=groups.tp.rank(),
        ep_rank=groups.ep.rank(),
        etp_rank=groups.expt_tp.rank(),
        force_reset_rng=True,
    )
    config = transformer_config(model, precision)
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=model.qk_layernorm,
        normalization=config.normalization,
    )
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=vocab_size,
        max_sequence_length=model.encoder_seq_length,
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,  # type: ignore[arg-type]  (Megatron says int, computes with any number)
        pg_collection=groups,
    )
    return gpt.cuda() if torch.cuda.is_available() else gpt


def final_hidden_states(model: torch.nn.Module, module: GPTModel, tokens: Tensor) -> Tensor:
    """The hidden states ``[S, B, H]`` that the output layer would turn into logits, of tokens ``[B, S]``.

    `model` is `module` as it is wrapped (by DDP); a pipeline stage that is not the last returns what it hands on.
    Differentiable. A stage that is told not to post-process stops after the final norm, so full logits never exist.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    post_process, module.post_process = module.post_process, False
    try:
        return model(tokens, positions, None)
    finally:
        module.post_process = post_process


def output_weight(module: GPTModel) -> Tensor:
    """This rank's rows of the output layer's weight, ``[V/tp, H]``."""
    if module.share_embeddings_and_output_weights:
        return module.shared_embedding_or_output_weight()
    return cast(Tensor, module.output_layer.weight)


def parameter_count(module: torch.nn.Module) -> int:
    """How many parameters this rank holds."""
    return sum(p.numel() for p in module.parameters())
