"""What every test shares: one thread a process, repeatable property tests, and reasons for what is skipped."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
os.environ["HF_HUB_OFFLINE"] = "1"  # no test may reach for the network

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")

_TESTS = Path(__file__).parent
REPOSITORY = _TESTS.parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark by folder, and skip what needs a GPU where there is none."""
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder in ("distributed", "gpu"):
            item.add_marker(getattr(pytest.mark, folder))
        if item.get_closest_marker("gpu") and not _has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; torch.cuda.is_available() is false here"))


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture
def repository() -> Path:
    """The checkout's root folder."""
    return REPOSITORY


@pytest.fixture(autouse=True)
def _single_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that is not told otherwise is rank 0 of 1, whatever started pytest."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
