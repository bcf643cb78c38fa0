"""The layers, under the names that Megatron-Core takes them by."""

from transformer_engine.pytorch import distributed, fp8, ops, router, tensor  # noqa: F401
from transformer_engine.pytorch.attention import DotProductAttention  # noqa: F401
from transformer_engine.pytorch.layers import GroupedLinear, LayerNormLinear, Linear, RMSNorm  # noqa: F401
