"""Attention over ``[S, B, heads, D]``, computed by PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class DotProductAttention(torch.nn.Module):
    """Grouped-query attention of this rank's heads, causal or without a mask; gives ``[S, B, heads * D]``."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.1,
        attn_mask_type: str = "causal",
        sequence_parallel: bool = False,
        tp_size: int = 1,
        get_rng_state_tracker: Callable[[], Any] | None = None,
        tp_group: Any = None,
        layer_number: int | None = None,
        attention_type: str = "self",
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.heads = num_attention_heads // tp_size
        self.groups = (num_gqa_groups or num_attention_heads) // tp_size
        self.softmax_scale = softmax_scale
        if attention_dropout:
            raise NotImplementedError("attention dropout has no stand-in")

    def forward(
        self,
        query_layer: Tensor,
        key_layer: Tensor,
        value_layer: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: str = "causal",
    ) -> Tensor:
        """``causal`` aligns the first query with the first key, as Transformer Engine's does."""
        if attn_mask_type not in ("causal", "no_mask"):
            raise NotImplementedError(f"mask type {attn_mask_type} has no stand-in")
        if attention_mask is not None:
            raise ValueError(f"an attention mask was given with mask type {attn_mask_type}, which would ignore it")
        if (query_layer.shape[2], key_layer.shape[2]) != (self.heads, self.groups):
            raise ValueError(f"{query_layer.shape[2]} heads on {key_layer.shape[2]} groups")
        query, key, value = (layer.permute(1, 2, 0, 3) for layer in (query_layer, key_layer, value_layer))
        out = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=attn_mask_type == "causal",
            scale=self.softmax_scale,
            enable_gqa=True,
        )
        return out.permute(2, 0, 1, 3).flatten(2)
