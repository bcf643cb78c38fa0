"""One cluster for all tests of this folder; without Slurm they are skipped, with the reason."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm import cluster


@pytest.fixture(scope="session")
def slurm() -> Iterator[cluster.Cluster]:
    reason = cluster.unavailable()
    if reason is not None:
        pytest.skip(reason)
    # Not pytest's own folder: its long name doesn't fit a socket.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, cluster.cluster(Path(folder)) as started:
        yield started
