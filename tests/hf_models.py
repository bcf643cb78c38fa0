"""Small random models of Hugging Face's library, one of each family that can be converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

VOCAB = 70  # no multiple of 8: the embedding is padded
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,  # logits far from uniform
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# family -> class, its options beside SIZES
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", {"head_dim": 16, "norm_topk_prob": True, **EXPERTS}),
    "qwen3_moe_pre_softmax": ("Qwen3Moe", {"head_dim": 16, "norm_topk_prob": False, **EXPERTS}),
    "qwen3": ("Qwen3", {"head_dim": 16, "intermediate_size": 48, "rope_theta": 1e6}),
    "qwen3_tied": ("Qwen3", {"head_dim": 16, "intermediate_size": 48, "tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"intermediate_size": 48}),
}


def make_model(name: str, **sizes: Any) -> Any:
    """The model `name` of `MODELS`, float32, seeded; its biases and norms are random, too."""
    import transformers

    kind, options = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**(SIZES | options | sizes))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    for key, parameter in model.named_parameters():
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, mean=0.0 if key.endswith("bias") else 1.0, std=0.2)
    return model


def save_model(name: str, folder: Path, **sizes: Any) -> Path:
    """`make_model` as `save_pretrained` writes it."""
    make_model(name, **sizes).save_pretrained(folder)
    return folder
