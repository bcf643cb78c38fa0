"""What the benchmarks share: one process a measurement, peak extra memory, tables.

**Peak extra memory** on a CPU is the process's high-water mark of resident memory during the run, less what was
resident when it began: everything above the inputs, which were written to before. Linux keeps the mark (``VmHWM`` in
``/proc/self/status``) and forgets it when ``5`` is written to ``/proc/self/clear_refs``; where that is forbidden the
mark of the whole life of the process stands in, which is exact as long as making the inputs took less than the run.
Every measurement is a process of its own, so nothing is left over from another way's allocator. On a GPU it is
``torch.cuda.max_memory_allocated`` less the allocation at the start.

**Processor seconds** are those of all threads together. On a machine that others use too, and with one thread
(``--threads 1``: a waiting thread of OpenMP spins), they tell more than seconds on the clock.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure(run: Callable[[], object], repeats: int = 1) -> dict[str, float]:
    """Peak extra bytes, median seconds and median processor seconds of ``run``, which is called ``repeats`` times."""
    start = _reset_peak()
    seconds, cpu_seconds = [], []
    for _ in range(repeats):
        began, cpu_began = time.perf_counter(), time.process_time()
        run()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
        cpu_seconds.append(time.process_time() - cpu_began)
    return {
        "extra_bytes": _peak() - start,
        "seconds": statistics.median(seconds),
        "cpu_seconds": statistics.median(cpu_seconds),
    }


def in_own_process(script: str, *arguments: str, exact_memory: bool = False) -> dict[str, Any]:
    """Runs ``script`` with ``arguments`` in a fresh interpreter; its last line of output is a JSON object.

    With ``exact_memory`` the C library returns every block above 64 KiB to the system at once, where it would keep
    some below 32 MiB. That costs time.
    """
    command = [sys.executable, script, *arguments]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**16)} if exact_memory else None
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    lines = done.stdout.strip().splitlines()
    if done.returncode != 0 or not lines:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        return {"failed": last}
    return json.loads(lines[-1])


def matrix_rate(dtype: torch.dtype, size: int = 4096 if DEVICE.type == "cuda" else 2048) -> float:
    """Floating-point operations a second of one large square product: the device's matrix rate in practice."""
    a, b = (torch.randn(size, size, device=DEVICE).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    best = min(measure(lambda: torch.mm(a, b, out=out))["seconds"] for _ in range(5))
    return 2 * size**3 / best


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(len(line[i]) for line in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}\n")
    for line in (header, *rows):
        first, *others = zip(line, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]), flush=True)


def _reset_peak() -> int:
    """Forgets the high-water mark; returns the bytes in use now."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _peak() -> int:
    return torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else _status("VmHWM")


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: this benchmark needs Linux")
