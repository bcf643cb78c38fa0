"""A small valid config to bend."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nemo_sspo.config import RunConfig, load_config


@pytest.fixture
def tiny() -> Callable[..., RunConfig]:
    """`tiny("model.seed=2", ...)`: the config of `make train` with overrides."""
    return lambda *overrides: load_config("tiny_moe_cpu", overrides)
