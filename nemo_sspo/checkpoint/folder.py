"""Checkpoint folders: their names, what they say of themselves, and whether they are whole.

    checkpoints/step_000100/   state.json   manifest.json   rollout.pt   shards/

`step_NNNNNN` counts GRPO steps; `step_NNNNNN_MM` has MM optimizer steps of the next rollout behind it, which is in
`rollout.pt`; one from within the cold start is `cold_start_NNNNNN`. `shards/` is Megatron-Core's distributed format.
`manifest.json` has every file's size and checksum: it is written last, and the folder gets its name after that.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_sspo.errors import UserError
from nemo_sspo.parallel.ranks import rank, world, world_size
from nemo_sspo.parallel.reductions import all_gather_list

STATE, MANIFEST, ROLLOUT, SHARDS = "state.json", "manifest.json", "rollout.pt", "shards"


@dataclass(frozen=True)
class Position:
    """How far a run has come, in steps done."""

    cold_start_step: int = 0
    rollout: int = 0  # GRPO steps
    step: int = 0  # optimizer steps of GRPO
    mini_batch: int = 0  # those of them on the rollout in flight
    skipped: int = 0  # optimizer steps, of both stages, without a finite loss and gradient norm
    skipped_in_row: int = 0
    seconds: float = 0.0  # of training, over all sessions


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk, by what its state.json says."""

    path: Path
    position: Position
    stage: str  # "cold_start" | "grpo"
    shape: dict[str, Any]  # the config keys that fix the weights, with their values
    optimizer_steps: int  # that the optimizer and the learning-rate schedule of this stage have behind them
    score: float | None = None  # the validation's, by checkpoint_callback_params.monitor; None: not validated here
    in_flight: bool = False  # rollout.pt holds a rollout that is not trained on to its end

    @property
    def name(self) -> str:
        """The folder's name."""
        p = self.position
        if self.stage == "cold_start":
            return f"cold_start_{p.cold_start_step:06d}"
        return f"step_{p.rollout:06d}" + (f"_{p.mini_batch:02d}" if self.in_flight else "")

    @property
    def order(self) -> tuple:
        """By which later checkpoints of a run compare as larger."""
        p = self.position
        return self.stage == "grpo", p.rollout, p.step, self.in_flight, p.cold_start_step

    def write_state(self) -> None:
        """Write state.json into `path`."""
        state = asdict(self) | {"path": None}
        (self.path / STATE).write_text(json.dumps(state, indent=2) + "\n")


def read_checkpoint(path: Path) -> Checkpoint:
    """What a checkpoint says of itself.

    Raises:
        UserError: there is none, or its state.json can't be read.
    """
    try:
        state = json.loads((path / STATE).read_text())
        return Checkpoint(**state | {"path": path, "position": Position(**state["position"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a readable checkpoint ({error}); name one that is whole, or delete it") from None


def list_checkpoints(folder: Path, damaged: Callable[[Path, str], None] = lambda path, why: None) -> list[Checkpoint]:
    """All checkpoints of a run that can be read, oldest first; `damaged` hears of each that can't, and why."""
    found = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if path.name.startswith(".") or not path.is_dir():
            continue
        try:
            if not (path / MANIFEST).is_file():
                raise UserError(f"{path}: it has no {MANIFEST}")
            found.append(read_checkpoint(path))
        except UserError as error:
            damaged(path, str(error))
    return sorted(found, key=lambda c: c.order)


def find_whole(folder: Path) -> Checkpoint | None:
    """The newest checkpoint whose files are all there and unharmed; None if there is no checkpoint at all.

    Each damaged one is named and skipped. A collective: the ranks share the reading.

    Raises:
        UserError: there are checkpoints, but none is whole.
    """
    complaints: list[str] = []

    def damaged(path: Path, why: str) -> None:
        complaints.append(why)
        if rank() == 0:
            print(f"Note: {path.name} is damaged and left aside: {why}", file=sys.stderr, flush=True)

    for checkpoint in reversed(list_checkpoints(folder, damaged)):
        harm = all_gather_list(check_files(checkpoint.path, slice(rank(), None, world_size())), world())
        if not harm:
            return checkpoint
        damaged(checkpoint.path, harm[0])
    if complaints:
        raise UserError(
            f"{folder}: no checkpoint there is whole ({complaints[0]}); restore one, or delete the folder to start anew"
        )
    return None


def best(checkpoints: Iterable[Checkpoint], mode: str) -> Checkpoint | None:
    """The one with the best score, the newest among equals."""
    sign = 1 if mode == "max" else -1
    scored = [c for c in checkpoints if c.score is not None]
    return max(scored, key=lambda c: (sign * (c.score or 0.0), c.order)) if scored else None


def remove(path: Path) -> None:
    """Delete a checkpoint; a kill in between leaves none that looks whole."""
    doomed = path.with_name(f".{path.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def clean_up(folder: Path) -> None:
    """What a kill in the middle of writing, replacing or deleting has left behind."""
    for path in folder.glob(".*.replaced"):
        target = path.with_name(path.name.removeprefix(".").removesuffix(".replaced"))
        if not target.exists():
            os.rename(path, target)  # killed between the two renames of `publish`
    for pattern in (".*.partial", ".*.replaced", ".*.deleted"):
        for path in folder.glob(pattern):
            shutil.rmtree(path)


# -- manifest ---------------------------------------------------------------------------------------------------------


def describe(path: Path) -> dict[str, Any]:
    """A file's size in bytes and its checksum."""
    with open(path, "rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def write_manifest(folder: Path, files: dict[str, dict[str, Any]]) -> None:
    """Write manifest.json: name within the folder -> size and checksum."""
    (folder / MANIFEST).write_text(json.dumps({"files": files}, indent=2) + "\n")


def check_files(folder: Path, share: slice = slice(None)) -> list[str]:
    """What is wrong with the files in the manifest (those of `share`, by name)."""
    try:
        files = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{folder / MANIFEST} can't be read ({error})"]
    return [harm for name in sorted(files)[share] if (harm := _harm(folder / name, files[name]))]


def _harm(path: Path, expected: dict[str, Any]) -> str | None:
    try:
        size = path.stat().st_size
        if size != expected["bytes"]:
            return f"{path} has {size} bytes, written were {expected['bytes']}"
        return None if describe(path) == expected else f"{path} has another checksum than when it was written"
    except OSError as error:
        return f"{path} can't be read ({error.strerror})"
    except (KeyError, TypeError):
        return f"{path} is not described in {MANIFEST}"


# -- durability -------------------------------------------------------------------------------------------------------


def sync(folder: Path) -> None:
    """Make a folder's files and its list of names durable."""
    for path in folder.rglob("*"):
        _fsync(path)
    _fsync(folder)


def publish(partial: Path, target: Path) -> None:
    """Give a complete folder its name, in the place of what had it before."""
    sync(partial)
    replaced = target.with_name(f".{target.name}.replaced")
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.rename(target, replaced)
    os.rename(partial, target)
    _fsync(target.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
