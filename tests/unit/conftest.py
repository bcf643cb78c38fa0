"""Fixtures of the unit tests: a world of one process, and a tiny policy in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def groups() -> Iterator:
    """Megatron-Core's process groups of a single process."""
    from nemo_sspo.training.distributed import process_groups
    from tests.tiny import tiny_config

    with process_groups(tiny_config().model) as groups:
        yield groups


@pytest.fixture
def policy(groups):
    """A freshly drawn tiny GPTModel."""
    from nemo_sspo.model import build_model
    from tests.tiny import VOCAB, tiny_config

    return build_model(tiny_config().model, VOCAB, groups)
