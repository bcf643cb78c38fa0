"""Generation engines behind one protocol."""

from nemo_sspo.compat import megatron_cpu as megatron_cpu  # isort: skip  (before Megatron-Core is imported)
from nemo_sspo.generation.protocol import GenerationEngine, GenerationOutput, SamplingParams

__all__ = ["GenerationEngine", "GenerationOutput", "SamplingParams"]
