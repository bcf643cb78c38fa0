"""The benchmark of layouts runs, and prints its tables. No time is asserted."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.layouts import log_slope

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_prints_both_tables_with_finite_slopes(repository: Path) -> None:
    command = [sys.executable, "-m", "tests.benchmarks.layouts", "--quick", "--layouts", "single", "tp2_sp"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=repository, env=environment, timeout=900)
    assert done.returncode == 0, done.stderr
    _, comparison, length, rows = done.stdout.split("micro-batches of 2")
    assert _first_cells(comparison)[:3] == ["layout", "single", "tp2_sp"]
    for table in (length, rows):
        cells = [line.split() for line in table.splitlines() if ": time" in line or ": memory" in line]
        assert [" ".join(line[:2]) for line in cells] == [
            f"{name}: {quantity}" for name in ("single", "tp2_sp") for quantity in ("time", "memory")
        ]
        assert all(math.isfinite(float(line[-1])) for line in cells)


def _first_cells(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines()[1:] if line.strip()]


@pytest.mark.parametrize("power", [0.0, 1.0, 2.0])
def test_slope_is_the_power(power: float) -> None:
    assert log_slope([1, 2, 4, 8], [3.0 * x**power for x in (1, 2, 4, 8)]) == pytest.approx(power)
