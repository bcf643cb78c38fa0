"""Megatron-Core's checkpoint writer, in this process.

What: `FileSystemWriterAsync` writes its files in the thread that asks for it, and passes the results through a queue in
memory. Asynchronous saving is then a thread (`nemo_sspo.checkpoint.saver`); format and reading are untouched.
Version: megatron-core 0.16.1.
Why: it forks a process for every file, of a process that has threads (gloo's, CUDA's), and spawns another for the
queue: a script without a guarded main hangs, and eight ranks start sixteen interpreters for a few megabytes.
When it can go: when Megatron-Core can write from a thread. `tests/unit/compat` tells.
"""

from __future__ import annotations

import queue
from typing import Any

from megatron.core.dist_checkpointing.strategies import filesystem_async


def _write_here(transforms: list, use_msc: bool, rank: int, buckets: list, results: queue.Queue) -> None:
    written: Any = {}
    for i, bucket in enumerate(buckets):
        outcome: queue.Queue = queue.Queue()
        pending: queue.Queue = queue.Queue()
        pending.put(i)
        filesystem_async.FileSystemWriterAsync.write_preloaded_data(
            transforms,
            i,
            bucket,
            outcome,  # type: ignore[arg-type]  (a queue of processes there, of threads here)
            pending,  # type: ignore[arg-type]
            use_fsync=True,
        )
        _, items = outcome.get()
        if isinstance(items, Exception):
            written = items
            break
        written[i] = items
    results.put(written)


def install() -> None:
    """Put the writer in place. Idempotent."""
    writer: Any = filesystem_async.FileSystemWriterAsync
    writer.write_preloaded_data_multiproc = staticmethod(_write_here)
    filesystem_async._get_write_results_queue = queue.Queue  # type: ignore[assignment]  (one a save)
