"""Megatron-Core's own GPTModel in the shape of the Qwen2.5 and Qwen3 models, with experts or without."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from nemo_sspo.compat import megatron_cpu
from nemo_sspo.config.schema import ModelConfig
from nemo_sspo.errors import UserError
from nemo_sspo.model import transformer_engine
from nemo_sspo.model.layers import mark_experts, stage_layers
from nemo_sspo.model.weights import draw_weights, sharded_weights, shards

_DTYPES = {"32": torch.float32, "bf16": torch.bfloat16}


def transformer_config(model: ModelConfig, precision: str = "32") -> TransformerConfig:
    """Megatron-Core's configuration of one model.

    RMSNorm before attention and feed-forward layers, grouped-query attention with q/k norm (Qwen3) or biased
    projections (Qwen2.5), SwiGLU without bias, and a router in float32 whose probabilities are the softmax over the
    chosen experts (Qwen3 Technical Report, arXiv 2505.09388).
    Layers are Transformer Engine's or Megatron-Core's own (`nemo_sspo.model.transformer_engine.chosen`). The fused
    kernels of Megatron-Core itself, which exist only for CUDA, are off.
    """
    megatron_cpu.install()
    fused_layers = transformer_engine.chosen(model.transformer_engine)
    dtype = _DTYPES[precision]
    return TransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        num_query_groups=model.num_query_groups,
        kv_channels=model.kv_channels,
        **_feed_forward(model),
        transformer_impl="transformer_engine" if fused_layers else "local",
        moe_grouped_gemm=fused_layers and model.num_moe_experts is not None,
        add_bias_linear=False,
        add_qkv_bias=model.add_qkv_bias,
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
        virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
        # Interleaved stages exchange tensors in overlapping pairs: batched, two stages would mix up both directions.
        overlap_p2p_comm=model.virtual_pipeline_model_parallel_size is not None,
        batch_p2p_comm=model.virtual_pipeline_model_parallel_size is None,
        expert_tensor_parallel_size=model.expert_tensor_parallel_size,
        context_parallel_size=model.context_parallel_size,
        sequence_parallel=model.sequence_parallel,
        recompute_granularity=model.activations_checkpoint_granularity,  # type: ignore[arg-type]
        recompute_method=model.activations_checkpoint_method,  # type: ignore[arg-type]
        recompute_num_layers=model.activations_checkpoint_num_layers,
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


def _feed_forward(model: ModelConfig) -> dict[str, Any]:
    """The part of Megatron-Core's configuration on experts, or on the feed-forward layers where there are none."""
    if model.num_moe_experts is None:
        return {"ffn_hidden_size": model.ffn_hidden_size}
    return {
        "ffn_hidden_size": model.moe_ffn_hidden_size,
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size,
        "num_moe_experts": model.num_moe_experts,
        "moe_router_topk": model.moe_router_topk,
        # The softmax over one chosen expert is 1, whatever the router says: it could not learn.
        "moe_router_pre_softmax": model.moe_router_pre_softmax or model.moe_router_topk == 1,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "aux_loss" if model.moe_aux_loss_coeff else "none",
        "moe_aux_loss_coeff": model.moe_aux_loss_coeff,
        "moe_token_dispatcher_type": "alltoall",
        "moe_permute_fusion": False,
    }


@dataclass(frozen=True)
class Policy:
    """This rank's part of the policy: one module a virtual pipeline stage, mostly a single one.

    The embedding and the output layer have `padded_vocab_size` rows: whoever reads logits, ``[B, S, V]`` split over
    ``groups.tp``, masks those from `vocab_size`, the tokenizer's, on.
    """

    chunks: list[GPTModel]
    vocab_size: int
    groups: ProcessGroupCollection

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(self.chunks[0].parameters()).device

    @property
    def config(self) -> TransformerConfig:
        """Megatron-Core's configuration."""
        return self.chunks[0].config

    def sharded_weights(self) -> dict[str, Any]:
        """Megatron-Core's sharded state dict; see `nemo_sspo.model.weights`."""
        return sharded_weights(self.chunks, self.groups)


def build_model(
    model: ModelConfig, vocab_size: int, groups: ProcessGroupCollection, precision: str = "32", draw: bool = True
) -> Policy:
    """The policy for a tokenizer of `vocab_size` ids, with weights drawn from ``model.seed``, alike in any layout.

    With `draw` False the weights are whatever was in memory: for one that is filled next.

    Raises:
        UserError: ``model.override_vocab_size`` is smaller than the tokenizer's vocabulary.
    """
    vocab_size = _vocabulary(model, vocab_size)
    config = transformer_config(model, precision)
    model_parallel_cuda_manual_seed(
        model.seed,
        tp_rank=groups.tp.rank(),
        ep_rank=groups.ep.rank(),
        etp_rank=groups.expt_tp.rank(),
        force_reset_rng=True,
    )
    virtual = config.virtual_pipeline_model_parallel_size
    chunks = [_chunk(model, config, vocab_size, groups, stage) for stage in (range(virtual) if virtual else [None])]
    mark_experts(chunks, groups)
    if draw:
        draw_weights(chunks, groups, model.seed)
    return Policy(chunks, vocab_size, groups)


def _vocabulary(model: ModelConfig, tokenizer_size: int) -> int:
    override = model.override_vocab_size
    if override is not None and override < tokenizer_size:
        raise UserError(
            f"model.override_vocab_size: got {override}, allowed: null or at least the {tokenizer_size} ids of the "
            "tokenizer; take the tokenizer that belongs to the model"
        )
    return override or tokenizer_size


def padded_vocab_size(model: ModelConfig, vocab_size: int) -> int:
    """The rows of the embedding: the same under every layout, so that a checkpoint of one fits another."""
    multiple = model.make_vocab_size_divisible_by
    return -(-vocab_size // multiple) * multiple


def _chunk(
    model: ModelConfig, config: TransformerConfig, vocab_size: int, groups: ProcessGroupCollection, stage: int | None
) -> GPTModel:
    virtual = config.virtual_pipeline_model_parallel_size
    number, count = (stage or 0) * groups.pp.size() + groups.pp.rank(), (virtual or 1) * groups.pp.size()
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=stage_layers(config, stage, groups.pp.rank()),  # type: ignore[arg-type]
        vocab_size=padded_vocab_size(model, vocab_size),
        max_sequence_length=model.encoder_seq_length,
        pre_process=number == 0,
        post_process=number == count - 1,
        parallel_output=True,
        share_embeddings_and_output_weights=model.share_embeddings_and_output_weights,
        position_embedding_type="rope",
        rotary_base=model.rotary_base,  # type: ignore[arg-type]  (Megatron says int, computes with any number)
        pg_collection=groups,
        vp_stage=stage,
    )
    return gpt.cuda() if torch.cuda.is_available() else gpt


def final_hidden_states(model: torch.nn.Module, module: GPTModel, tokens: Tensor) -> Tensor:
    """What this stage makes of tokens ``[B, S]``: on the last stage the hidden states ``[S, B, H]`` that the output
    layer would turn into logits, on another what it hands on, ``[S/tp, B, H]`` under sequence parallelism.

    `model` is `module` as it is wrapped (by DDP). Differentiable. A stage that is told not to post-process stops after
    the final norm, so full logits never exist. The gradient of the last stage's states must be whole on every
    tensor-parallel rank, as `linear_logprobs` gives it.
    """
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    post_process, module.post_process = module.post_process, False
    try:
        hidden = model(tokens, positions, None)
    finally:
        module.post_process = post_process
    if post_process and module.config.sequence_parallel:
        return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=module.tp_group)
    return hidden


def sequence_multiple(config: TransformerConfig) -> int:
    """What the length of sequences must divide by: sequence parallelism cuts them, and FP8 kernels take 16 tokens."""
    return (config.tensor_model_parallel_size if config.sequence_parallel else 1) * (16 if config.fp8 else 1)


def output_weight(module: GPTModel) -> Tensor:
    """This rank's rows of the output layer's weight, ``[V/tp, H]``."""
    if module.share_embeddings_and_output_weights:
        return module.shared_embedding_or_output_weight()
    return cast(Tensor, module.output_layer.weight)


def parameter_count(policy: Policy) -> int:
    """How many parameters the whole policy has, padding of the vocabulary included. A collective."""
    main = [s for s in shards(policy.sharded_weights()) if is_main_replica(s.replica_id)]
    count = torch.tensor(sum(s.data.numel() for s in main if s.data is not None), device=policy.device)
    torch.distributed.all_reduce(count)
    return int(count)
