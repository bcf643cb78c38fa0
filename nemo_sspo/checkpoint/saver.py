"""Writing checkpoints: at once or beside the training, all or nothing, the newest and the best kept."""

from __future__ import annotations

import io
import queue
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy
from torch.distributed.checkpoint.api import CheckpointException

from nemo_sspo.checkpoint import folder as files
from nemo_sspo.checkpoint.folder import Checkpoint
from nemo_sspo.checkpoint.state import sharded_state
from nemo_sspo.compat import megatron_checkpoint
from nemo_sspo.config.schema import CheckpointConfig
from nemo_sspo.errors import RunError, UserError
from nemo_sspo.model import Policy
from nemo_sspo.parallel.ranks import on_rank_zero, world
from nemo_sspo.parallel.reductions import all_gather_list, any_rank

_BYTES_A_SHARD = 2048  # reserved for Megatron-Core's index, which rank 0 writes when all shards are on disk


@dataclass
class _Pending:
    """A checkpoint whose shards are being written."""

    checkpoint: Checkpoint  # its path is where it is written
    request: AsyncRequest
    writer: threading.Thread
    described: queue.SimpleQueue  # this rank's files, or the exception that its writer met


class CheckpointSaver:
    """Writes a run's checkpoints into `folder`, and keeps the newest ``save_top_k`` and the best by ``monitor``.

    A collective through and through: every rank makes the same calls. A checkpoint that can't be written, as on a full
    disk, leaves the last good one; ``on_error`` says whether the run goes on.
    """

    def __init__(self, folder: Path, options: CheckpointConfig, say: Callable[[str], None]) -> None:
        megatron_checkpoint.install()
        self.folder = folder
        self.options = options
        self.say = say
        self._pending: _Pending | None = None
        on_rank_zero(lambda: files.clean_up(folder))

    def save(self, checkpoint: Checkpoint, policy: Policy, optimizer: Any, rollout: dict[str, Any] | None) -> None:
        """Write `checkpoint`, whose path does not matter. With ``async_save`` it gets its name in a later call.

        Args:
            rollout: the rollout in flight, for rollout.pt; tensors, lists and numbers.

        Raises:
            RunError: it can't be written, and ``on_error`` is stop.
        """
        self.finish()
        partial = replace(checkpoint, path=self.folder / f".{checkpoint.name}.partial")
        state = sharded_state(policy, optimizer if checkpoint.optimizer_steps else None)
        try:
            shard_count = sum(all_gather_list([sum(1 for _ in _leaves(state))], world()))
            on_rank_zero(lambda: _prepare(partial, rollout, _BYTES_A_SHARD * shard_count))
            request = dist_checkpointing.save(
                state,
                str(partial.path / files.SHARDS),
                TorchDistSaveShardedStrategy("torch_dist", 1, thread_count=1),
                async_sharded_save=True,
            )
        except (UserError, CheckpointingException) as error:
            self._failed(partial, str(error))
            return
        assert request is not None
        self._pending = self._start(partial, request)
        if not self.options.async_save:
            self.finish()

    def poll(self) -> None:
        """Give the checkpoint that is being written its name, if all ranks have written their part. See `save`."""
        pending = self._pending
        if pending is not None and not any_rank(pending.writer.is_alive(), world()):
            self.finish()

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, and give it its name. See `save`."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        pending.writer.join()
        described = pending.described.get()
        failures = all_gather_list([str(described)] if isinstance(described, Exception) else [], world())
        if failures or isinstance(described, Exception):
            self._failed(pending.checkpoint, failures[0])
            return
        try:
            on_rank_zero(lambda: (pending.checkpoint.path / "reserved").unlink())
            _finalize(pending.request)
            everyone = all_gather_list(list(described.items()), world())
            on_rank_zero(lambda: self._complete(pending.checkpoint, dict(everyone)))
        except (UserError, CheckpointingException) as error:
            self._failed(pending.checkpoint, str(error))

    def _start(self, partial: Checkpoint, request: AsyncRequest) -> _Pending:
        arguments = list(request.async_fn_args)
        if request.preload_fn is not None:
            arguments[1] = request.preload_fn()
            if self.options.async_save:
                arguments[1] = _copied(arguments[1])  # training goes on changing the tensors
        described: queue.SimpleQueue = queue.SimpleQueue()

        def write() -> None:
            try:
                if request.async_fn is not None:
                    request.async_fn(*arguments)
                described.put(_own_files(partial.path))
            except Exception as error:  # reported by every rank in `finish`
                described.put(error)

        writer = threading.Thread(target=write, name="checkpoint writer", daemon=True)
        writer.start()
        return _Pending(partial, request, writer, described)

    def _complete(self, partial: Checkpoint, described: dict[str, Any]) -> None:
        """Rank 0: the manifest, the name, and what to keep."""
        path = partial.path
        for file in sorted(p for p in path.rglob("*") if p.is_file()):
            name = str(file.relative_to(path))
            if name not in described:
                described[name] = files.describe(file)
        files.write_manifest(path, described)
        files.publish(path, self.folder / partial.name)
        keep = self.options.save_top_k
        found = files.list_checkpoints(self.folder)
        kept = {c.path for c in (found[-keep:] if keep > 0 else found)}
        if self.options.monitor and (top := files.best(found, self.options.mode)):
            kept.add(top.path)
        for checkpoint in found:
            if checkpoint.path not in kept:
                files.remove(checkpoint.path)

    def _failed(self, partial: Checkpoint, why: str) -> None:
        why = why.splitlines()[0]
        if dist.get_rank() == 0:
            shutil.rmtree(partial.path, ignore_errors=True)
        found = files.list_checkpoints(self.folder)
        last = f"the last good one is {found[-1].path.name}" if found else "there is none before it"
        message = f"checkpoint {partial.name} can't be written ({why}); {last}"
        if self.options.on_error == "stop":
            raise RunError(
                f"{message}. Make room in {self.folder} and run the same command again; "
                "exp_manager.checkpoint_callback_params.on_error=continue would go on without it"
            )
        self.say(f"{message}. Training goes on")


def _prepare(partial: Checkpoint, rollout: dict[str, Any] | None, reserve: int) -> None:
    """Rank 0: everything but the shards, and room for what is written last."""
    shutil.rmtree(partial.path, ignore_errors=True)
    (partial.path / files.SHARDS).mkdir(parents=True)
    partial.write_state()
    if rollout is not None:
        content = (
            io.BytesIO()
        )  # torch.save into a file meets a full disk with a RuntimeError of its own, not an OSError
        torch.save(rollout, content)
        (partial.path / files.ROLLOUT).write_bytes(content.getbuffer())
    (partial.path / "reserved").write_bytes(b"\1" * reserve)


def _finalize(request: AsyncRequest) -> None:
    """Let Megatron-Core write its index. What stops one rank stops all: it is raised on each of them."""
    for finalize in request.finalize_fns:
        try:
            finalize()
        except CheckpointException as error:  # PyTorch's; not an Exception
            causes = [cause for cause, _ in error.failures.values()]
            raise CheckpointingException(str(causes[0] if causes else error)) from error


def _own_files(path: Path) -> dict[str, Any]:
    """Sizes and checksums of the shards that this rank has written."""
    own = (path / files.SHARDS).glob(f"__{dist.get_rank()}_*")
    return {str(file.relative_to(path)): files.describe(file) for file in own}


def _copied(buckets: list) -> list:
    return [
        (file, key, (blobs, [(item, tensor.clone()) for item, tensor in tensors]))
        for file, key, (blobs, tensors) in buckets
    ]


def _leaves(node: Any) -> Any:
    if isinstance(node, dict):
        for value in node.values():
            yield from _leaves(value)
    else:
        yield node
