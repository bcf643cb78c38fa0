"""Which process this is, and what one process does for all."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from nemo_sspo.errors import UserError
from nemo_sspo.parallel.reductions import all_gather_list

T = TypeVar("T")


def world_size() -> int:
    """Processes of this run, as ``torchrun`` or Slurm's launcher set it; 1 without a launcher."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def rank() -> int:
    """This process's number in the run."""
    return int(os.environ.get("RANK", "0"))


def world() -> dist.ProcessGroup:
    """The group of all processes of the run."""
    group = dist.group.WORLD
    assert group is not None, "torch.distributed is not initialised"
    return group


def agree(action: Callable[[], object]) -> None:
    """Do `action` on every rank. What one refuses, every rank refuses, with the first one's message. A collective.

    Raises:
        UserError: `action` raised it on some rank.
    """
    complaint: list[str] = []
    try:
        action()
    except UserError as error:
        complaint = [str(error)]
    complaints = all_gather_list(complaint, world())
    if complaints:
        raise UserError(complaints[0])


def on_rank_zero(action: Callable[[], T]) -> T | None:
    """Run `action` on rank 0 only (None elsewhere). What it refuses, every rank refuses: none waits for the others.

    Raises:
        UserError: `action` raised it on rank 0, or an OSError. A collective: all ranks of the run call it.
    """
    result, message = None, [None]
    if dist.get_rank() == 0:
        try:
            result = action()
        except (UserError, OSError) as error:
            message = [str(error)]
    dist.broadcast_object_list(message, src=0)
    if message[0] is not None:
        raise UserError(message[0])
    return result
