"""A stand-in for Transformer Engine on a CPU: the modules that Megatron-Core builds on, in plain PyTorch.

Transformer Engine has no CPU kernels. This package has its names, arguments, parameter names and its division of work
among tensor-parallel ranks, as far as Megatron-Core 0.16.1 asks for them, so that Megatron-Core's own wrappers run here
as they are. What it can't show is anything of the kernels: tests/gpu asks the real ones.
"""

import transformer_engine.common
import transformer_engine.pytorch  # noqa: F401

__version__ = "2.9.0"
