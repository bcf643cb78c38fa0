"""What a run on a GPU is told before its model is built."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from nemo_sspo.errors import UserError
from nemo_sspo.model import transformer_engine
from nemo_sspo.training import run
from tests.tiny import VOCAB, tiny_config

TOKENIZER: Any = SimpleNamespace(vocab_size=VOCAB)


@pytest.fixture
def asked(monkeypatch) -> list[tuple]:
    """A GPU of 80 bytes; what the planner is asked."""
    calls: list[tuple] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(run, "memory_warning", lambda *given: calls.append(given[1:]) or "too large")
    return calls


@pytest.mark.parametrize(
    ("missing", "precision", "attention"), [(None, "bf16", "flash"), (None, "32", "local"), ("gone", "bf16", "local")]
)
def test_layers_and_memory(asked, monkeypatch, capsys, missing, precision, attention):
    monkeypatch.setattr(transformer_engine, "why_not", lambda: missing)
    run._notes_on_the_gpu(tiny_config(f"trainer.precision={precision}"), TOKENIZER)
    assert asked == [(1, 80, VOCAB, attention)]
    layers = "Note: gone; layers are Megatron-Core's own, whose attention keeps its scores\n" if missing else ""
    assert capsys.readouterr().out == f"{layers}Note: too large\n"


def test_every_rank_says_what_cannot_be_had(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    monkeypatch.setenv("RANK", "1")
    config = tiny_config("model.transformer_engine=true", "trainer.accelerator=gpu")
    with pytest.raises(UserError, match="got true, but Transformer Engine can't be imported"):
        run._notes_on_the_gpu(config, TOKENIZER)
