"""Transformer Engine's layers in place of Megatron-Core's own: the one file that asks for them.

Attention that does not hold its scores (in bfloat16), norms fused with the linear layer behind them, and one grouped
multiplication for all experts of a rank. Weights keep the names that they have in the local layers, so checkpoints,
drawn weights and Hugging Face's mapping are the same with either.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import TENorm
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from packaging.version import Version

from nemo_sspo.compat.transformer_engine import BROKEN
from nemo_sspo.errors import UserError

NORM = TENorm  # after the last layer
MINIMUM = "2.0"  # norms of queries and keys, grouped experts, extra state as a tensor


def chosen(wanted: bool | None) -> bool:
    """Whether the layers are Transformer Engine's: as ``model.transformer_engine`` says, or if null where they can run.

    Raises:
        UserError: it is wanted and can't be used; says why.
    """
    if wanted is None:
        return torch.cuda.is_available() and why_not() is None
    reason = why_not() if wanted else None
    if reason is not None:
        raise UserError(
            f"model.transformer_engine: got true, but {reason}; install transformer-engine[pytorch]>={MINIMUM} beside "
            "a CUDA build of PyTorch, as in NGC's containers, or set model.transformer_engine=false for "
            "Megatron-Core's own layers"
        )
    return wanted


def why_not() -> str | None:
    """Why Transformer Engine can't be used here; None if it can."""
    try:
        engine: Any = importlib.import_module("transformer_engine")
        importlib.import_module("transformer_engine.pytorch")
    except ImportError as error:
        return f"Transformer Engine can't be imported ({BROKEN or error})"
    found = str(getattr(engine, "__version__", "0"))
    return None if Version(found) >= Version(MINIMUM) else f"Transformer Engine is {found}"


def layer_spec(config: TransformerConfig) -> ModuleSpec:
    """One transformer layer."""
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
    )
    parts: Any = layer.submodules
    # Without experts this norm is fused with the first linear layer, whose name it then has, as in the local layers.
    parts.sharded_state_dict_keys_map = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
    return layer
