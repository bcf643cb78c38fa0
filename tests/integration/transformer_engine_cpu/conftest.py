"""Fixtures of the checks that run with the stand-in for Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def policy() -> Iterator[Any]:
    """A tiny policy of Transformer Engine's layers, of a single process."""
    from nemo_sspo.model import build_model
    from nemo_sspo.training.distributed import process_groups
    from tests.tiny import VOCAB, tiny_config

    model = tiny_config("model.transformer_engine=true", "trainer.accelerator=gpu").model
    with process_groups(model) as groups:
        yield build_model(model, VOCAB, groups)
