"""Fixtures of the checks that run with Megatron-Core 0.11."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest


@pytest.fixture(scope="module")
def world() -> Iterator[Any]:
    """Megatron-Core's process groups of a single process, as ``groups.tp`` and ``groups.pp``."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield SimpleNamespace(
        tp=parallel_state.get_tensor_model_parallel_group(), pp=parallel_state.get_pipeline_model_parallel_group()
    )
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
