"""A Hugging Face folder out of a policy: safetensors of at most 5 GB with an index; a kill loses one file at most.

Each file gets its name when it is whole, `config.json` comes last, and the same export again goes on with the file
after the last whole one. `.export.json` says whose export it is until then.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from nemo_sspo.errors import UserError
from nemo_sspo.model import Policy
from nemo_sspo.model.hf_weights import INDEX, hf_shapes, hf_tensors
from nemo_sspo.parallel.ranks import on_rank_zero, rank, world
from nemo_sspo.parallel.reductions import all_gather_list

SHARD_BYTES = 5 * 10**9
_MARK = ".export.json"
# Hugging Face's names of what a tokenizer and a generation configuration are made of.
_COPIED = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "generation_config.json",
)


def export_hf(
    policy: Policy,
    folder: Path,
    config: dict[str, Any],
    source: str,
    tokenizer: Path | None,
    progress: Callable[[int, int], object] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write `policy` into `folder`. A collective; rank 0 writes.

    Args:
        config: the fields of config.json.
        source: what is exported, in words; the export goes on only if it is the same.
        tokenizer: a folder whose tokenizer files are copied.
        progress: called with the bytes written so far and in all.

    Raises:
        UserError: `folder` holds a model, or another source's unfinished export; the disk is full.
    """
    shapes = hf_shapes(policy)
    size = policy.config.params_dtype.itemsize
    files = _plan({name: math.prod(shape) * size for name, shape in shapes.items()}, shard_bytes)
    on_rank_zero(lambda: _begin(folder, source))
    whole = all_gather_list([file for file in files if (folder / file).is_file()] if rank() == 0 else [], world())
    done = {name for file in whole for name in files[file]}
    written, total = 0, sum(math.prod(shape) for shape in shapes.values()) * size
    tensors = hf_tensors(policy, skip=done.__contains__)
    for file, names in files.items():
        held: dict[str, Tensor] = {}
        for name in names:
            if file not in whole:
                found, tensor = next(tensors)
                assert found == name
                if rank() == 0:
                    held[name] = tensor.cpu()
            written += math.prod(shapes[name]) * size
            if progress is not None:
                progress(written, total)
        if file not in whole:
            on_rank_zero(lambda file=file, held=held: _write(folder / file, held))
    on_rank_zero(lambda: _finish(folder, files, total, config, tokenizer))


def check_free(folder: Path) -> None:
    """UserError if `folder` holds a model."""
    if (folder / "config.json").exists():
        raise UserError(f"{folder}: holds a model already; choose another folder, or delete it")


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy what a tokenizer is made of."""
    for pattern in _COPIED:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _plan(sizes: dict[str, int], shard_bytes: int) -> dict[str, list[str]]:
    """File -> its tensors, in the order of their names; a tensor larger than a shard has one to itself."""
    groups: list[list[str]] = []
    room = 0
    for name, size in sizes.items():
        if not groups or size > room:
            groups.append([])
            room = shard_bytes
        groups[-1].append(name)
        room -= size
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": names for i, names in enumerate(groups, start=1)}


def _begin(folder: Path, source: str) -> None:
    check_free(folder)
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / _MARK
    if mark.exists() and json.loads(mark.read_text())["source"] != source:
        raise UserError(f"{folder}: holds an unfinished export of another model; choose another folder, or delete it")
    if not mark.exists() and any(folder.iterdir()):
        raise UserError(f"{folder}: is not empty; choose another folder, or delete it")
    mark.write_text(json.dumps({"source": source}))


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, metadata={"format": "pt"})
    except Exception as error:  # of the library's own; a full disk is one
        partial.unlink(missing_ok=True)
        raise UserError(f"{path}: can't be written ({error}); make room and run the same command again") from None
    with open(partial, "rb") as file:
        os.fsync(file.fileno())
    os.rename(partial, path)


def _finish(folder: Path, files: dict[str, list[str]], total: int, config: dict, tokenizer: Path | None) -> None:
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    if tokenizer is not None:
        copy_tokenizer(tokenizer, folder)
    partial = folder / ".config.json.partial"
    partial.write_text(json.dumps(config, indent=2) + "\n")
    os.rename(partial, folder / "config.json")
    (folder / _MARK).unlink()
