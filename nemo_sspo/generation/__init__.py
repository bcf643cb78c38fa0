"""Generation engines behind one protocol."""

from nemo_sspo.generation.protocol import GenerationEngine, GenerationOutput, SamplingParams, sample_seed

__all__ = ["GenerationEngine", "GenerationOutput", "SamplingParams", "sample_seed"]
