"""A vocabulary split across ranks gives the same log-probs, entropies and gradients as a whole one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import nemo_sspo.parallel.logprobs as logprobs_module
from nemo_sspo.parallel import IGNORE_INDEX, linear_logprobs, vocab_parallel_logprobs
from tests.distributed.launch import run_ranks

ROWS, HIDDEN, VOCAB = 13, 6, 1200
DTYPES = {"float64": (torch.float64, 1e-12), "float32": (torch.float32, 1e-5), "bfloat16": (torch.bfloat16, 1e-2)}
OUTSIDE = VOCAB + 5

Arrays = dict[str, np.ndarray]


def results(dtype: torch.dtype, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None) -> Arrays:
    """Outputs and gradients of both entrances; of the weight and the logits this rank's shard."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    # Peaks of very different height on different ranks, and targets on every rank.
    weight = (weight * torch.linspace(0.1, 4.0, VOCAB).unsqueeze(1)).to(dtype)
    targets = torch.linspace(0, VOCAB - 1, ROWS).long()
    targets[3] = IGNORE_INDEX
    shard = weight.chunk(size)[rank].clone().requires_grad_()
    logits = (hidden @ shard.T).detach().requires_grad_()
    linear = linear_logprobs(hidden, shard, targets, group, chunk_size=2, temperature=0.7)
    direct = vocab_parallel_logprobs(logits, targets, group, temperature=0.7)
    weights = torch.linspace(-1, 2, ROWS)
    loss = sum((logprobs * weights + entropy * weights.flip(0)).sum() for logprobs, entropy in (linear, direct))
    gradients = torch.autograd.grad(loss, (hidden, shard, logits))
    names = ("logprobs", "entropy", "logprobs from logits", "entropy from logits", "hidden", "weight", "logits")
    return {
        name: tensor.detach().double().numpy()
        for name, tensor in zip(names, (*linear, *direct, *gradients), strict=True)
    }


def worker(rank: int, size: int) -> dict[str, Any]:
    logprobs_module._TILE_SIZE = ROWS * 100  # several tiles a rank; the whole vocabulary is one
    group = dist.group.WORLD
    found: dict[str, Any] = {name: results(dtype, rank, size, group) for name, (dtype, _) in DTYPES.items()}
    shard = torch.zeros(VOCAB // size, HIDDEN)
    try:
        linear_logprobs(torch.zeros(1, HIDDEN), shard, torch.tensor([OUTSIDE]), group)
    except ValueError as error:
        found["error"] = str(error)
    empty = torch.zeros(0, HIDDEN, requires_grad=True)
    logprobs, entropy = linear_logprobs(empty, shard, torch.zeros(0, dtype=torch.int64), group)
    (logprobs.sum() + entropy.sum()).backward()
    found["empty"] = tuple(logprobs.shape), tuple(empty.grad.shape)
    return found


@pytest.mark.parametrize("size", [2, 4], ids=["tp2", "tp4"])
def test_split_vocabulary_equals_whole(size: int, tmp_path: Path) -> None:
    ranks = run_ranks(worker, size, tmp_path)
    for name, (dtype, tolerance) in DTYPES.items():
        whole = results(dtype)
        for key, expected in whole.items():
            shares = [found[name][key] for found in ranks]
            if key in ("weight", "logits"):
                shares = [np.concatenate(shares, axis=0 if key == "weight" else 1)]
            for share in shares:  # where it is no shard, on every rank
                np.testing.assert_allclose(share, expected, rtol=tolerance, atol=tolerance, err_msg=f"{name} {key}")
    for found in ranks:
        assert f"got {OUTSIDE} at [0]" in found["error"] and f"[0, {VOCAB})" in found["error"]
        assert found["empty"] == ((0,), (0, HIDDEN))


def stuck(rank: int, size: int) -> None:
    if rank == 1:
        raise RuntimeError("this rank gives up")
    dist.barrier()


def test_an_error_on_one_rank_is_shown(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2: (.|\n)*this rank gives up"):
        run_ranks(stuck, 2, tmp_path)
