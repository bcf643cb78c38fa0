"""Checkpoints in simple form: one folder a step with weights, optimizer and position, whole or not there at all.

    checkpoints/step_000100/   model.safetensors   optimizer.pt   state.json

`step_NNNNNN` counts GRPO steps; one from within the cold start is `cold_start_NNNNNN`. Nothing random is saved: every
draw comes from the run's seed and its step. Written by rank 0 (data-parallel ranks hold the same weights), read by all.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from nemo_sspo.errors import UserError


@dataclass(frozen=True)
class Position:
    """How far a run has come, in steps done."""

    cold_start_step: int = 0
    rollout: int = 0  # GRPO steps
    step: int = 0  # optimizer steps of GRPO
    seconds: float = 0.0  # of training, over all sessions

    @property
    def folder(self) -> str:
        """The checkpoint folder's name."""
        return f"step_{self.rollout:06d}"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that was found whole."""

    path: Path
    position: Position
    stage: str  # "cold_start" | "grpo"
    shape: dict[str, Any]  # the config keys that fix the weights, with their values


def save_checkpoint(
    folder: Path,
    position: Position,
    stage: str,
    shape: dict[str, Any],
    model: torch.nn.Module,
    optimizer_state: Any,
    keep: int,
) -> Path:
    """Write a checkpoint under another name, make it durable, rename it, and keep the newest `keep` (-1: all)."""
    name = position.folder if stage == "grpo" else f"cold_start_{position.cold_start_step:06d}"
    target, partial = folder / name, folder / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    save_file(_tensors(model), partial / "model.safetensors")
    torch.save(optimizer_state, partial / "optimizer.pt")
    state = {"position": asdict(position), "stage": stage, "shape": shape}
    (partial / "state.json").write_text(json.dumps(state, indent=2) + "\n")
    for file in partial.iterdir():
        with open(file, "rb") as handle:
            os.fsync(handle.fileno())
    _sync_folder(partial)
    replaced = folder / f".{name}.replaced"
    shutil.rmtree(replaced, ignore_errors=True)
    if target.exists():
        os.rename(target, replaced)
    os.rename(partial, target)
    _sync_folder(folder)
    shutil.rmtree(replaced, ignore_errors=True)
    if keep > 0:
        for old in list_checkpoints(folder)[:-keep]:
            shutil.rmtree(old.path)
    return target


def list_checkpoints(folder: Path) -> list[Checkpoint]:
    """All whole checkpoints of a run, oldest first."""
    found = []
    for path in folder.iterdir() if folder.is_dir() else ():
        if not path.name.startswith(".") and (path / "state.json").is_file():
            found.append(read_checkpoint(path))
    return sorted(found, key=lambda c: (c.stage == "grpo", c.position.rollout, c.position.cold_start_step))


def read_checkpoint(path: Path) -> Checkpoint:
    """What a checkpoint says of itself.

    Raises:
        UserError: there is none, or its state.json can't be read.
    """
    try:
        state = json.loads((path / "state.json").read_text())
        return Checkpoint(path, Position(**state["position"]), state["stage"], state["shape"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: not a readable checkpoint ({error}); name one that is whole, or delete it") from None


def load_model(checkpoint: Checkpoint, model: torch.nn.Module, shape: dict[str, Any]) -> None:
    """Put a checkpoint's weights into `model`, every one of them or none.

    Raises:
        UserError: the checkpoint is of another model (names the keys that differ), or its weights can't be read.
    """
    changed = [key for key in {**checkpoint.shape, **shape} if checkpoint.shape.get(key) != shape.get(key)]
    if changed:
        differences = ", ".join(f"{key} was {checkpoint.shape.get(key)} and is {shape.get(key)}" for key in changed)
        raise UserError(
            f"{checkpoint.path}: the checkpoint is of another model: {differences}; set them back, or choose another "
            "exp_manager.explicit_log_dir"
        )
    try:
        tensors = load_file(checkpoint.path / "model.safetensors")
    except (OSError, SafetensorError) as error:
        path = checkpoint.path / "model.safetensors"
        raise UserError(f"{path}: can't be read ({error}); delete that checkpoint folder") from None
    own = _tensors(model)
    wrong = sorted(set(own) ^ set(tensors)) or [n for n in own if own[n].shape != tensors[n].shape]
    if wrong:
        raise UserError(f"{checkpoint.path / 'model.safetensors'}: {wrong[0]} is missing, extra or of another shape")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(tensors[name])


def load_optimizer_state(checkpoint: Checkpoint) -> Any:
    """The optimizer's state, for its ``load_state_dict``. No pickled code is run.

    Raises:
        UserError: it can't be read (it is never silently started anew).
    """
    path = checkpoint.path / "optimizer.pt"
    try:
        return torch.load(path, weights_only=True)
    except Exception as error:  # torch.load raises whatever the bytes provoke
        raise UserError(f"{path}: can't be read ({type(error).__name__}); delete that checkpoint folder") from None


def _sync_folder(folder: Path) -> None:
    """Make the folder's list of names durable, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's weights by name; Megatron-Core's state dict also has empty ``_extra_state`` entries."""
    return {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
