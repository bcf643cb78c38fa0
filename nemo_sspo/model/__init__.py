"""The policy network: Megatron-Core's layers in Qwen3's shape."""

from nemo_sspo.compat import megatron_cpu as megatron_cpu  # isort: skip  (before Megatron-Core is imported)
from nemo_sspo.model.builder import (
    Policy,
    build_model,
    final_hidden_states,
    output_weight,
    padded_vocab_size,
    parameter_count,
    sequence_multiple,
    transformer_config,
)

__all__ = [
    "Policy",
    "build_model",
    "final_hidden_states",
    "output_weight",
    "padded_vocab_size",
    "parameter_count",
    "sequence_multiple",
    "transformer_config",
]
