"""What the checks share: sizes, and Megatron-Core 0.11's configuration."""

from __future__ import annotations

from typing import Any

TOKENS, EXPERTS, K = 24, 8, 2
RECOMPUTE = {
    "none": {},
    "moe": {"moe_layer_recompute": True},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


def make_config(**options: Any) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    small: dict[str, Any] = {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "add_bias_linear": False}
    experts = {"num_moe_experts": EXPERTS, "moe_router_topk": K, "moe_token_dispatcher_type": "alltoall"}
    return TransformerConfig(**{**small, **experts, "moe_router_load_balancing_type": "none", **options})
