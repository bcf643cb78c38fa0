"""A config written out again, and the part of it that a checkpoint depends on."""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf

from nemo_sspo.config.schema import ModelConfig, RunConfig

# What fixes the weights' shapes, and what the weights compute: a checkpoint fits only a model that agrees on all.
_SHAPE_FIELDS = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_moe_experts",
    "moe_router_topk",
    "moe_router_pre_softmax",
    "moe_ffn_hidden_size",
    "ffn_hidden_size",
    "qk_layernorm",
    "add_qkv_bias",
    "layernorm_epsilon",
    "rotary_base",
    "share_embeddings_and_output_weights",
    "make_vocab_size_divisible_by",
    "override_vocab_size",
)


def to_yaml(config: RunConfig) -> str:
    """The whole config as YAML, every default written out; `load_run_config` reads it back unchanged."""
    return OmegaConf.to_yaml(OmegaConf.structured(config))


def shape_fields(model: ModelConfig) -> dict[str, Any]:
    """Dotted key -> value of everything that the weights depend on, the tokenizer (the vocabulary) included.

    Two configs with equal `shape_fields` can share a checkpoint; where they differ, the keys say what changed.
    """
    fields = {f"model.{name}": getattr(model, name) for name in _SHAPE_FIELDS}
    return fields | {
        "model.tokenizer.library": model.tokenizer.library,
        "model.tokenizer.type": model.tokenizer.type,
    }
