"""Configs of the small model under any layout, by short names."""

from __future__ import annotations

import copy

from nemo_sspo.config import load_config
from nemo_sspo.config.schema import RunConfig

SHORT = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
    "layers": "num_layers",
    "heads": "num_attention_heads",
    "groups": "num_query_groups",
    "experts": "num_moe_experts",
    "ffn": "moe_ffn_hidden_size",
    "pad": "make_vocab_size_divisible_by",
    "granularity": "activations_checkpoint_granularity",
    "method": "activations_checkpoint_method",
    "recomputed": "activations_checkpoint_num_layers",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
}
BASE = load_config("tiny_moe_cpu", ["model.num_layers=12", "model.num_attention_heads=8", "model.num_query_groups=4"])


def config_of(**values: object) -> RunConfig:
    """12 layers, 8 heads, 4 query groups, 8 experts of width 64, and `values` by the names of `SHORT`."""
    config = copy.deepcopy(BASE)
    for name, value in values.items():
        key = SHORT[name]
        assert hasattr(config.model, key)
        setattr(config.model, key, value)
    return config
