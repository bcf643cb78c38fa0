"""Soft Sequence Policy Optimization for mixture-of-experts language models on Megatron-Core."""

__version__ = "0.1.0"
