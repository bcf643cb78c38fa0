"""Responses whose tokens lie on two context-parallel ranks: the objective's loss and gradient are those of one rank."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch.distributed as dist

from nemo_sspo.objective import build_objective
from nemo_sspo.parallel.reductions import sum_over_ranks
from tests.distributed.launch import run_ranks
from tests.numerics.batches import EVERY_CASE, case_id, random_batch

RANKS = 2


def columns(rank: int, width: int) -> list[int]:
    """Zigzag, as context parallelism deals tokens out: 0 3 4 7 ... and 1 2 5 6 ..."""
    return [t for t in range(width) if (t % (2 * RANKS) in (rank, 2 * RANKS - 1 - rank))]


def worker(rank: int, size: int) -> list[tuple[float, np.ndarray, float]]:
    reduce = partial(sum_over_ranks, group=dist.group.WORLD)
    found = []
    for options in EVERY_CASE:
        batch = random_batch()
        mine = columns(rank, batch.mask.shape[1])
        policy = batch.policy.detach()[:, mine].requires_grad_()
        out = build_objective(options)(
            policy,
            batch.old[:, mine],
            batch.advantages,
            batch.mask[:, mine],
            num_responses=batch.mask.shape[0],
            num_tokens=int(batch.mask.sum()),
            reduce=reduce,
        )
        out.loss.backward()
        assert policy.grad is not None
        found.append((out.loss.item(), policy.grad.numpy(), out.metrics["sequence_weight/max"].item()))
    return found


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> list:
    return run_ranks(worker, RANKS, tmp_path_factory.mktemp("shards"))


@pytest.mark.parametrize("case", range(len(EVERY_CASE)), ids=[case_id(c) for c in EVERY_CASE])
def test_sharded_equals_whole(sharded, case):
    batch = random_batch()
    out = build_objective(EVERY_CASE[case])(*batch.arguments)
    out.loss.backward()
    assert batch.policy.grad is not None
    assert sum(rank[case][0] for rank in sharded) == pytest.approx(out.loss.item(), rel=1e-12, abs=1e-14)
    for rank in range(RANKS):
        mine = columns(rank, batch.mask.shape[1])
        np.testing.assert_allclose(sharded[rank][case][1], batch.policy.grad[:, mine].numpy(), rtol=1e-10, atol=1e-13)
