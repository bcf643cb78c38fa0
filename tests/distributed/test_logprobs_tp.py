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
# Rows that are no padding: all, all but some of the last rank's, and so few that whole ranks have nothing but padding.
REAL = {"whole": None, "padded": VOCAB - 7, "a whole rank of padding": 500}

Arrays = dict[str, np.ndarray]


def results(
    dtype: torch.dtype, real: int | None, rank: int = 0, size: int = 1, group: dist.ProcessGroup | None = None
) -> Arrays:
    """Outputs and gradients of both entrances; of the weight and the logits this rank's shard.

    From row `real` on the weight is padding. Logits that are handed over have -inf there.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype)
    # Peaks of very different height on different ranks, and targets on every rank.
    weight = (weight * torch.linspace(0.1, 4.0, VOCAB).unsqueeze(1)).to(dtype)
    targets = torch.linspace(0, (real or VOCAB) - 1, ROWS).long()
    targets[3] = IGNORE_INDEX
    shard = weight.chunk(size)[rank].clone().requires_grad_()
    padding = torch.arange(VOCAB).chunk(size)[rank] >= (real or VOCAB)
    logits = (hidden @ shard.T).detach().masked_fill(padding, -torch.inf).requires_grad_()
    linear = linear_logprobs(hidden, shard, targets, group, chunk_size=2, temperature=0.7, vocab_size=real)
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
    found: dict[str, Any] = {
        f"{name} {real}": results(dtype, rows, rank, size, group)
        for name, (dtype, _) in DTYPES.items()
        for real, rows in REAL.items()
    }
    shard = torch.zeros(VOCAB // size, HIDDEN)
    found["errors"] = []
    for target, vocab_size in ((OUTSIDE, None), (VOCAB - 7, VOCAB - 7), (0, VOCAB + 1)):
        try:
            linear_logprobs(torch.zeros(1, HIDDEN), shard, torch.tensor([target]), group, vocab_size=vocab_size)
        except ValueError as error:
            found["errors"].append(str(error))
    empty = torch.zeros(0, HIDDEN, requires_grad=True)
    logprobs, entropy = linear_logprobs(empty, shard, torch.zeros(0, dtype=torch.int64), group)
    (logprobs.sum() + entropy.sum()).backward()
    found["empty"] = tuple(logprobs.shape), tuple(empty.grad.shape)
    return found


@pytest.fixture(scope="module", params=[2, 4], ids=["tp2", "tp4"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(worker, request.param, tmp_path_factory.mktemp("logprobs"))


@pytest.mark.parametrize("real", REAL)
@pytest.mark.parametrize("name", DTYPES)
def test_split_vocabulary_equals_whole(ranks: list[dict[str, Any]], name: str, real: str) -> None:
    dtype, tolerance = DTYPES[name]
    for key, expected in results(dtype, REAL[real]).items():
        shares = [found[f"{name} {real}"][key] for found in ranks]
        if key in ("weight", "logits"):
            shares = [np.concatenate(shares, axis=0 if key == "weight" else 1)]
        if key == "weight":
            assert (shares[0][REAL[real] or VOCAB :] == 0).all()
            assert (shares[0][: REAL[real]] != 0).any()
        for share in shares:  # where it is no shard, on every rank
            np.testing.assert_allclose(share, expected, rtol=tolerance, atol=tolerance, err_msg=f"{name} {key}")


def test_padding_and_the_mask_of_logits_are_alike() -> None:
    found = results(torch.float64, REAL["a whole rank of padding"])
    for key in ("logprobs", "entropy"):
        np.testing.assert_allclose(found[key], found[f"{key} from logits"], rtol=1e-12, atol=1e-12)


def test_errors_speak_of_the_whole_vocabulary(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        outside, padding, too_large = found["errors"]
        assert f"got {OUTSIDE} at [0]" in outside and f"[0, {VOCAB})" in outside
        assert f"got {VOCAB - 7} at [0]" in padding and f"[0, {VOCAB - 7})" in padding
        assert f"[1, {VOCAB}]" in too_large and f"got {VOCAB + 1}" in too_large
        assert found["empty"] == ((0,), (0, HIDDEN))


def stuck(rank: int, size: int) -> None:
    if rank == 1:
        raise RuntimeError("this rank gives up")
    dist.barrier()


def test_an_error_on_one_rank_is_shown(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank 1 of 2: (.|\n)*this rank gives up"):
        run_ranks(stuck, 2, tmp_path)
