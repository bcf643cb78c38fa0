"""Runs a function on several processes of one gloo group and brings back what each of them returned."""

from __future__ import annotations

import pickle
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Processes are forked from a server that has imported PyTorch, once for all tests, and has used no thread of it.
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed", "nemo_sspo.checkpoint", "nemo_sspo.training.distributed"])


def run_ranks(worker: Callable[..., Any], size: int, folder: Path, *arguments: Any, limit: float = 60.0) -> list[Any]:
    """``worker(rank, size, *arguments)`` on every rank, in the default group; its results in rank order.

    Worker and arguments must be picklable, the worker a function of a module. An error on any rank fails the test
    with that rank's traceback; so does a rank that has not answered after ``limit`` seconds, as when one hangs.
    """
    answers = _CONTEXT.Queue()
    store = str(folder / f"store_{time.monotonic_ns()}")
    processes = [
        _CONTEXT.Process(target=_rank, args=(worker, rank, size, store, answers, arguments), daemon=True)
        for rank in range(size)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    deadline = time.monotonic() + limit
    try:
        while len(results) < size and not errors and time.monotonic() < deadline:
            try:
                rank, error, result = answers.get(timeout=0.2)
            except queue.Empty:
                died = [rank for rank, process in enumerate(processes) if process.exitcode not in (None, 0)]
                errors |= {rank: f"exit code {processes[rank].exitcode}" for rank in died if rank not in results}
                continue
            if error is None:
                results[rank] = pickle.loads(result)
            else:
                errors[rank] = error
    finally:
        for process in processes:
            process.join(timeout=5.0 if len(results) == size else 0.0)
            if process.is_alive():
                process.kill()
    if errors:
        raise AssertionError("\n".join(f"rank {rank} of {size}: {error}" for rank, error in sorted(errors.items())))
    if len(results) < size:
        missing = sorted(set(range(size)) - set(results))
        raise AssertionError(f"ranks {missing} of {size} did not answer within {limit:g} s")
    return [results[rank] for rank in range(size)]


def each(cases: Mapping[Any, tuple], action: Callable[..., Any]) -> dict[Any, Any]:
    """Within a worker: ``action(*arguments)`` for one case after another, an error with its case's name.

    Processes take far longer to start than most cases take.
    """
    results = {}
    for name, arguments in cases.items():
        try:
            results[name] = action(*arguments)
        except Exception as error:
            error.add_note(f"in case {name}")
            raise
    return results


def _rank(worker: Callable[..., Any], rank: int, size: int, store: str, answers: Any, arguments: tuple) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
        # As bytes: tensors would be passed as shared memory, which goes with this process.
        answers.put((rank, None, pickle.dumps(worker(rank, size, *arguments))))
        dist.barrier()  # no rank leaves while another still talks to it
        dist.destroy_process_group()
    except Exception:
        answers.put((rank, traceback.format_exc(), None))
