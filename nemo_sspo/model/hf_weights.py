"""Weights from a Hugging Face folder into a policy, and out of it again, tensor by tensor, under any layout.

A rank reads the slices that it holds and nothing else, out of the mapped file into its shard. On the way out one whole
tensor exists at a time, and a copy of its part where a rank's part are columns. Safetensors only: unpickling runs code
of whoever wrote the file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensor, is_main_replica
from safetensors import SafetensorError, safe_open
from torch import Tensor

from nemo_sspo.errors import UserError, some
from nemo_sspo.model.builder import Policy
from nemo_sspo.model.hf_names import Piece, pieces
from nemo_sspo.model.weights import shards
from nemo_sspo.parallel.ranks import agree, world
from nemo_sspo.parallel.reductions import all_gather_list

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FINITE_ROWS = 256  # looked at together; PyTorch's isfinite makes copies of what it looks at
_UNUSED = ("rotary_emb.inv_freq",)  # made again from the configuration; old files have it


def tensor_files(folder: Path) -> dict[str, Path]:
    """Name -> file of every tensor in a Hugging Face folder.

    Raises:
        UserError: no safetensors, or a file is missing (an interrupted download), unreadable or cut short.
    """
    again = "download it again"
    if (folder / INDEX).is_file():
        try:
            index = json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{folder / INDEX}: no weight map can be read from it ({error!r}); {again}") from None
        files = {name: folder / file for name, file in index.items()}
    elif (folder / SINGLE).is_file():
        files = dict.fromkeys(_names(folder / SINGLE), folder / SINGLE)
    else:
        pickled = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
        why = (
            f"only pickled weights ({pickled[0]}), which are refused: reading them runs code"
            if pickled
            else "no weights"
        )
        raise UserError(f"{folder}: {why}; give a folder with {SINGLE} or {INDEX}")
    held = {file: set(_names(file)) for file in sorted(set(files.values()))}
    for name, file in files.items():
        if name not in held[file]:
            raise UserError(f"{file}: lacks {name}, which {INDEX} says is there; {again}")
    return files


def _names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as opened:
            return list(opened.keys())
    except FileNotFoundError:
        raise UserError(
            f"{file}: missing, though {INDEX} names it; the download was interrupted, go on with it"
        ) from None
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: can't be read as safetensors ({error}); download it again") from None


def load_hf_weights(policy: Policy, folder: str | Path, progress: Callable[[int, int], object] | None = None) -> None:
    """Fill the policy with the weights in `folder`. A collective; nothing is filled before all names and shapes fit.

    `progress` is called with the pieces done and to do on this rank.

    Raises:
        UserError: on every rank alike: what `tensor_files` refuses; a tensor that is missing, extra, of another shape
            or not finite; each by its name.
    """
    folder = Path(folder)
    wanted, files = hf_shapes(policy), dict[str, Path]()
    agree(lambda: files.update(_checked_files(folder, policy, wanted)))
    mine = [(shard, piece) for shard in _shards(policy) for piece in _pieces(policy, shard)]
    mine.sort(key=lambda item: (files[item[1].name], item[1].name))  # each file is opened once
    agree(lambda: _fill(mine, files, progress))


def hf_tensors(policy: Policy, skip: Callable[[str], bool] = lambda _: False) -> Iterator[tuple[str, Tensor]]:
    """Hugging Face's name and the whole tensor, one after another, sorted by name, on every rank. A collective.

    Tensors that `skip` names (alike on every rank) are left out and never gathered. Each is on the policy's device and
    the caller's to keep.
    """
    mine: dict[str, list[tuple[Piece, Tensor]]] = {}
    for shard in _shards(policy):
        if is_main_replica(shard.replica_id) and shard.data is not None:
            for piece in _pieces(policy, shard):
                mine.setdefault(piece.name, []).append((piece, shard.data.detach()[piece.here]))
    rank = dist.get_rank()
    everyone = all_gather_list(
        [(name, rank, i, piece) for name, parts in mine.items() for i, (piece, _) in enumerate(parts)], world()
    )
    by_name: dict[str, list[tuple[int, int, Piece]]] = {}
    for name, owner, i, piece in everyone:
        by_name.setdefault(name, []).append((owner, i, piece))
    dtype = policy.config.params_dtype
    for name in sorted(by_name):
        if skip(name):
            continue
        parts = by_name[name]
        whole = torch.empty(parts[0][2].shape, dtype=dtype, device=policy.device)
        for owner, i, piece in parts:
            target = whole[piece.there]
            if owner == rank:
                target.copy_(mine[name][i][1])
            if dist.get_world_size() > 1:
                # Rows of the whole are sent as they lie; columns by way of a copy.
                part = target if target.is_contiguous() else target.contiguous()
                dist.broadcast(part, src=owner)
                if part is not target:
                    target.copy_(part)
        yield name, whole


def hf_shapes(policy: Policy) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that `hf_tensors` gives, sorted. A collective."""
    mine = [(piece.name, piece.shape) for shard in _shards(policy) for piece in _pieces(policy, shard)]
    return dict(sorted(all_gather_list(list(dict(mine).items()), world())))


def _shards(policy: Policy) -> list[ShardedTensor]:
    return list(shards(policy.sharded_weights()))


def _pieces(policy: Policy, shard: ShardedTensor) -> Iterator[Piece]:
    return pieces(shard, policy.config, policy.vocab_size)


def _checked_files(folder: Path, policy: Policy, wanted: dict[str, tuple[int, ...]]) -> dict[str, Path]:
    files = tensor_files(folder)
    missing = sorted(wanted.keys() - files.keys())
    if missing:
        raise UserError(f"{folder}: {some(missing)} missing; is it the folder of another model, or a part of one?")
    tied = {"lm_head.weight"} if policy.chunks[0].share_embeddings_and_output_weights else set()
    extra = sorted(name for name in files.keys() - wanted.keys() - tied if not name.endswith(_UNUSED))
    if extra:
        raise UserError(
            f"{folder}: {some(extra)} not in the model, and would be dropped; is it another model's folder?"
        )
    for file in sorted({files[name] for name in wanted}):
        with safe_open(file, "pt") as opened:
            for name in (name for name in wanted if files[name] == file):
                found = tuple(opened.get_slice(name).get_shape())
                if found != wanted[name]:
                    raise UserError(f"{file}: {name} has shape {list(found)}, the model wants {list(wanted[name])}")
    return files


def _fill(
    mine: list[tuple[ShardedTensor, Piece]], files: dict[str, Path], progress: Callable[[int, int], object] | None
) -> None:
    done = 0
    with torch.no_grad():
        for shard in {id(shard): shard for shard, _ in mine}.values():
            assert shard.data is not None
            shard.data.zero_()  # rows that pad the vocabulary
        for file, items in groupby(mine, key=lambda item: files[item[1].name]):
            with safe_open(file, "pt") as opened:
                for shard, piece in items:
                    values = opened.get_slice(piece.name)[piece.there]
                    if not all(bool(torch.isfinite(part).all()) for part in values.split(_FINITE_ROWS)):
                        raise UserError(f"{file}: {piece.name} has values that are not finite; download it again")
                    assert shard.data is not None
                    shard.data[piece.here].copy_(values)
                    done += 1
                    if progress is not None:
                        progress(done, len(mine))
