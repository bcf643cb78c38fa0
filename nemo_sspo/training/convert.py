"""`nemo-sspo convert`: between a Hugging Face folder and Megatron-Core's distributed checkpoints, under any layout."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from nemo_sspo.checkpoint import Checkpoint, CheckpointSaver, Position, find_whole, load_weights, read_checkpoint
from nemo_sspo.checkpoint.export import check_free, copy_tokenizer, export_hf
from nemo_sspo.checkpoint.folder import STATE
from nemo_sspo.config import load_run_config
from nemo_sspo.config.hf import read_hf_config, to_hf_config
from nemo_sspo.config.layout import layout_complaints
from nemo_sspo.config.resolve import shape_fields
from nemo_sspo.config.schema import CheckpointConfig, ModelConfig, OptimizerConfig, RunConfig
from nemo_sspo.data import build_tokenizer
from nemo_sspo.errors import UserError
from nemo_sspo.model import Policy, build_model
from nemo_sspo.model.hf_weights import load_hf_weights
from nemo_sspo.parallel.ranks import on_rank_zero, rank, world_size
from nemo_sspo.training.distributed import process_groups
from nemo_sspo.training.notes import note

CHECKPOINTS = "checkpoints"
_PRECISION = {"float32": "32", "bfloat16": "bf16"}


def hf_to_megatron(source: Path, target: Path, overrides: Sequence[str] = ()) -> int:
    """Write a Hugging Face folder as a checkpoint that ``pretrained_checkpoint.restore_from_path`` takes.

    `overrides` lay out the processes (``model.expert_model_parallel_size=8``); what is written does not depend on it.
    Returns the exit status 0.

    Raises:
        UserError: the folder is not one of a known model, whole and unharmed; `target` exists; the disk is full.
    """
    model, precision = model_of(source, overrides)
    with process_groups(model) as groups:
        on_rank_zero(lambda: check_free(target))
        policy = build_model(model, 0, groups, precision, draw=False)
        with bar(f"reading {source.name}") as progress:
            load_hf_weights(policy, source, progress)
        checkpoint = Checkpoint(target, Position(), "grpo", shape_fields(model), optimizer_steps=0)
        saver = CheckpointSaver(target / CHECKPOINTS, CheckpointConfig(on_error="stop", monitor=None), note)
        saver.save(checkpoint, policy, None, None)
        on_rank_zero(lambda: _copy_rest(source, target))
    return 0


def megatron_to_hf(source: Path, target: Path, overrides: Sequence[str] = ()) -> int:
    """Write a run's checkpoint, or what `hf_to_megatron` wrote, as a Hugging Face folder.

    `source` is a run's folder (its newest checkpoint), one checkpoint in it, or a converted folder.

    Raises:
        UserError: there is no checkpoint, or none is whole; `target` holds a model; the disk is full.
    """
    single = (source / STATE).is_file()
    root = source.parent.parent if single else source
    model, precision, tokenizer, vocab_size, config = _described(root, overrides)
    with process_groups(model) as groups:
        found = read_checkpoint(source) if single else find_whole(root / CHECKPOINTS)
        if found is None:
            raise UserError(f"{source}: no checkpoint; give a run's folder, or one that `nemo-sspo convert` wrote")
        policy = build_model(model, vocab_size, groups, precision, draw=False)
        load_weights(found, policy, _shape_in(found, model))
        with bar(f"writing {target.name}") as progress:
            export_hf(policy, target, config, f"{found.path.resolve()} {found.position}", tokenizer, progress)
    return 0


def load_pretrained(policy: Policy, folder: Path, model: ModelConfig) -> None:
    """Start from a Hugging Face folder, or from one that `hf_to_megatron` wrote. A collective.

    Raises:
        UserError: the folder is not whole, or of another model.
    """
    if (folder / CHECKPOINTS).is_dir():
        found = find_whole(folder / CHECKPOINTS)
        if found is None:
            raise UserError(f"{folder / CHECKPOINTS}: no checkpoint; convert the model again")
        load_weights(found, policy, _shape_in(found, model))
        return
    with bar(f"reading {folder.name}") as progress:
        load_hf_weights(policy, folder, progress)


@contextmanager
def bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on rank 0, for a callback of what is done and what there is to do."""
    share = TextColumn("{task.percentage:.0f} %")
    columns = (TextColumn("{task.description}"), BarColumn(), share, TimeRemainingColumn())
    with Progress(*columns, disable=rank() != 0) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def model_of(folder: Path, overrides: Sequence[str]) -> tuple[ModelConfig, str]:
    """The model in a Hugging Face folder, laid out as `overrides` say, and its precision."""
    shape = read_hf_config(folder)
    stated = json.loads((folder / "config.json").read_text())
    dtype = stated.get("dtype", stated.get("torch_dtype", "float32"))
    if dtype not in _PRECISION:
        raise UserError(f"{folder / 'config.json'}: dtype: got {dtype}, allowed: {', '.join(_PRECISION)}")
    length = stated.get("max_position_embeddings", 4096)
    unused = {"micro_batch_size": 1, "global_batch_size": 1, "optim": OptimizerConfig(lr=0.0)}
    model = ModelConfig(**shape, encoder_seq_length=length, **unused)
    return _laid_out(model, overrides), _PRECISION[dtype]


def _laid_out(model: ModelConfig, overrides: Sequence[str]) -> ModelConfig:
    """`model` with a layout of its own: one process, or as `overrides` say."""
    names = [f.name for f in fields(ModelConfig) if f.name.endswith("_parallel_size")] + ["sequence_parallel"]
    defaults = {f.name: f.default for f in fields(ModelConfig) if f.name in names}
    for text in overrides:
        key, _, value = text.partition("=")
        name = key.removeprefix("model.")
        if name not in names or not value:
            allowed = ", ".join(f"model.{n}" for n in names)
            raise UserError(f"override {text!r}: a conversion takes the keys of the layout only: {allowed}")
        try:
            section = OmegaConf.merge(OmegaConf.structured(ModelConfig), OmegaConf.from_dotlist([f"{name}={value}"]))
            defaults[name] = getattr(section, name)
        except OmegaConfBaseException as error:
            raise UserError(f"override {text!r}: {' '.join(str(error).split())}") from None
    laid_out = replace(model, **defaults)
    for complaint in layout_complaints(RunConfig(model=laid_out), world_size()):
        raise UserError(complaint)
    return laid_out


def _described(root: Path, overrides: Sequence[str]) -> tuple[ModelConfig, str, Path | None, int, dict[str, Any]]:
    """Model, precision, tokenizer folder, tokenizer's size and config.json of a run's or a converted folder."""
    if (root / "config.json").is_file():
        model, precision = model_of(root, overrides)
        return model, precision, root, 0, json.loads((root / "config.json").read_text())
    run = load_run_config(root)
    model, kind = _laid_out(run.model, overrides), run.model.tokenizer
    size = build_tokenizer(kind).vocab_size
    dtype = next(name for name, precision in _PRECISION.items() if precision == run.trainer.precision)
    config = to_hf_config(model, model.override_vocab_size or size, dtype)
    return model, run.trainer.precision, Path(kind.type) if kind.type else None, size, config


def _shape_in(found: Checkpoint, model: ModelConfig) -> dict[str, Any]:
    """What the checkpoint must agree with: the model. Its tokenizer's folder may have moved."""
    tokenizer = {key: value for key, value in found.shape.items() if key.startswith("model.tokenizer.")}
    return shape_fields(model) | tokenizer


def _copy_rest(source: Path, target: Path) -> None:
    copy_tokenizer(source, target)
    shutil.copyfile(source / "config.json", target / "config.json")  # last: it says that all is there
