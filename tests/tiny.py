"""What many tests need: a config of the smallest model, its parts, and a batch made by hand."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nemo_sspo.config.load import load_config
from nemo_sspo.config.schema import RunConfig
from nemo_sspo.data.responses import ResponseBatch

VOCAB = 24

TINY = (
    "model.num_layers=2",
    "model.hidden_size=32",
    "model.num_attention_heads=4",
    "model.num_query_groups=2",
    "model.kv_channels=8",
    "model.num_moe_experts=4",
    "model.moe_ffn_hidden_size=16",
    "model.init_method_std=0.2",  # logits far from uniform
)


def tiny_config(*overrides: str) -> RunConfig:
    """``conf/tiny_moe_cpu.yaml`` with a model of a few thousand parameters."""
    return load_config("tiny_moe_cpu", [*TINY, *overrides])


def uneven_batch(rows: int = 6, vocab: int = VOCAB, seed: int = 0) -> ResponseBatch:
    """Rows of different prompt and response lengths, padded with token 0."""
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.randint(1, 5, (rows,), generator=generator)
    responses = torch.randint(1, 8, (rows,), generator=generator)
    return make_batch(
        [torch.randint(1, vocab, (int(n),), generator=generator).tolist() for n in prompts],
        [torch.randint(1, vocab, (int(n),), generator=generator).tolist() for n in responses],
    )


def make_batch(prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]]) -> ResponseBatch:
    """A right-padded batch from lists of token ids."""
    rows = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return ResponseBatch(tokens, torch.tensor([len(p) for p in prompts]), torch.tensor([len(r) for r in responses]))
