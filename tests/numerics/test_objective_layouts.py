"""The same numbers from any cut: micro-batches, packed rows, context-parallel shards."""

from __future__ import annotations

import threading
from functools import reduce as fold
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_sspo.objective import build_objective
from tests.numerics.batches import ALL, EVERY_CASE, Batch, case_id, loss_and_gradient, pack, random_batch

TOLERANCES = {torch.float64: {"rtol": 1e-12, "atol": 1e-13}, torch.float32: {"rtol": 1e-6, "atol": 1e-6}}
DTYPES = pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
EXTRAS = {"kl_coeff": 0.1, "entropy_coeff": 0.01, "rollout_correction": "token_tis", "rollout_sequence_mask": "max"}


class ShardGroup:
    """Stands for a context-parallel group: one thread a rank; all see the sums, and gradients flow back to all."""

    def __init__(self, size: int):
        self.barrier = threading.Barrier(size, timeout=20)
        self.slots: list = [None] * size

    def run(self, function) -> list:
        results: list = [None] * len(self.slots)

        def rank(r: int) -> None:
            try:
                results[r] = function(r, lambda value: self.sum(r, value))
            except Exception as error:
                results[r] = error

        threads = [threading.Thread(target=rank, args=(r,)) for r in range(len(self.slots))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results

    def sum(self, rank: int, value: torch.Tensor) -> torch.Tensor:
        self.slots[rank] = value
        self.barrier.wait()
        total = sum(self.slots)
        self.barrier.wait()
        return total


def shards(batch: Batch, ranks: int) -> list[list[int]]:
    """Columns of each rank, in zigzag order as context parallelism deals them out."""
    return [
        [t for t in range(batch.mask.shape[1]) if min(t % (2 * ranks), 2 * ranks - 1 - t % (2 * ranks)) == r]
        for r in range(ranks)
    ]


def sharded(objective, batch: Batch, ranks: int, **arguments):
    """Outputs of every rank, and the gradient of the sum of their losses."""
    columns = shards(batch, ranks)

    def rank(r, reduce):
        part = [value[:, columns[r]] for value in (batch.policy, batch.old)]
        extras = {name: value[:, columns[r]] for name, value in arguments.items()}
        return objective(*part, batch.advantages, batch.mask[:, columns[r]], reduce=reduce, **extras)

    outs = ShardGroup(ranks).run(rank)
    (gradient,) = torch.autograd.grad(sum(out.loss for out in outs), batch.policy)
    return outs, gradient


@DTYPES
@pytest.mark.parametrize("options", EVERY_CASE, ids=case_id)
def test_packed_rows_and_shards_equal_padded_rows(options, dtype):
    objective = build_objective(options)
    batch = random_batch(seed=4, dtype=dtype)
    loss, gradient = loss_and_gradient(objective, batch)
    metrics = objective(*batch.arguments).metrics

    packed, cu_seqlens, index = pack(batch)
    packed_loss, packed_gradient = loss_and_gradient(objective, packed, cu_seqlens=cu_seqlens)
    unpacked = (
        torch.zeros_like(gradient).flatten().index_copy(0, index, packed_gradient[: len(index)]).view_as(gradient)
    )
    torch.testing.assert_close(packed_loss, loss, **TOLERANCES[dtype])
    torch.testing.assert_close(unpacked, gradient, **TOLERANCES[dtype])
    assert (packed_gradient[len(index) :] == 0).all()
    packed_metrics = objective(*packed.arguments, cu_seqlens=cu_seqlens).metrics
    weights = objective.token_weights(*packed.arguments, cu_seqlens=cu_seqlens)[: len(index)]
    torch.testing.assert_close(weights, objective.token_weights(*batch.arguments).flatten()[index], **TOLERANCES[dtype])

    outs, sharded_gradient = sharded(objective, batch, ranks=2)
    torch.testing.assert_close(sum(out.loss for out in outs).detach(), loss, **TOLERANCES[dtype])
    torch.testing.assert_close(sharded_gradient, gradient, **TOLERANCES[dtype])
    sharded_metrics = fold(lambda a, b: a + b, [out.statistics for out in outs]).metrics()
    assert packed_metrics.keys() == sharded_metrics.keys() == metrics.keys()
    loose = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 1e-10, "atol": 1e-12}
    for name, value in metrics.items():
        torch.testing.assert_close(packed_metrics[name], value, **loose, msg=name)
        torch.testing.assert_close(sharded_metrics[name], value, **loose, msg=name)


@pytest.mark.parametrize("name", ["sspo", "dapo", "dr_grpo"])
def test_optional_terms_in_every_layout(name):
    objective = build_objective({"name": name, "rollout_cap": 1.1, "rollout_sequence_high": 1.2, **EXTRAS})
    batch, other = random_batch(seed=4), random_batch(seed=6)
    extras = {
        "reference_logprobs": other.old,
        "rollout_logprobs": batch.old + 0.2 * (other.policy - other.old).detach(),
        "entropy": other.old.abs(),
    }
    loss, gradient = loss_and_gradient(objective, batch, **extras)
    metrics = objective(*batch.arguments, **extras).metrics
    assert 0 < metrics["rollout_correction/masked_response_fraction"] < 1

    outs, sharded_gradient = sharded(objective, batch, 3, **extras)
    torch.testing.assert_close(sum(out.loss for out in outs).detach(), loss, **TOLERANCES[torch.float64])
    torch.testing.assert_close(sharded_gradient, gradient, **TOLERANCES[torch.float64])
    sharded_metrics = fold(lambda a, b: a + b, [out.statistics for out in outs]).metrics()

    packed, cu_seqlens, index = pack(batch, slack=0)
    packed_extras = {key: value.flatten()[index] for key, value in extras.items()}
    out = objective(*packed.arguments, cu_seqlens=cu_seqlens, **packed_extras)
    torch.testing.assert_close(out.loss.detach(), loss, **TOLERANCES[torch.float64])
    for key, value in metrics.items():
        torch.testing.assert_close(out.metrics[key], value, msg=key)
        torch.testing.assert_close(sharded_metrics[key], value, msg=key)


def test_all_shards_raise_when_one_is_not_finite():
    batch = random_batch()
    batch.old[0, 0] = float("inf")
    errors = ShardGroup(2).run(
        lambda r, reduce: build_objective({"name": "sspo"})(
            batch.policy[:, r::2], batch.old[:, r::2], batch.advantages, batch.mask[:, r::2], reduce=reduce
        )
    )
    assert [type(error) for error in errors] == [ValueError, ValueError]
    assert "old_logprobs: 1 non-finite value" in str(errors[0])
    assert "Another context-parallel rank" in str(errors[1])


@settings(max_examples=40)
@given(
    name=st.sampled_from(ALL),
    rows=st.integers(1, 8),
    cuts=st.lists(st.integers(0, 8), max_size=5),
    seed=st.integers(0, 1000),
)
def test_any_split_into_micro_batches(name, rows, cuts, seed):
    """Any cut of the rows, empty pieces included, gives the loss, gradient and metrics of the whole."""
    objective = build_objective({"name": name})
    batch = random_batch(rows=rows, seed=seed)
    loss, gradient = loss_and_gradient(objective, batch)
    whole = objective(*batch.arguments)

    counts = {"num_responses": rows, "num_tokens": int(batch.mask.sum())}
    edges = [0, *sorted(min(cut, rows) for cut in cuts), rows]
    outs = [objective(*(value[a:b] for value in batch.arguments), **counts) for a, b in pairwise(edges)]
    total = sum(out.loss for out in outs)
    torch.testing.assert_close(total.detach(), loss, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(torch.autograd.grad(total, batch.policy)[0], gradient, rtol=1e-12, atol=1e-13)
    merged = fold(lambda a, b: a + b, [out.statistics for out in outs]).metrics()
    for key, value in whole.metrics.items():
        torch.testing.assert_close(merged[key], value, rtol=1e-10, atol=1e-12, msg=key)


def test_statistics_reduce_in_two_collectives():
    objective = build_objective({"name": "sspo"})
    batch = random_batch(rows=4)
    halves = [objective(*(value[rows] for value in batch.arguments)).statistics for rows in (slice(0, 2), slice(2, 4))]
    calls = []

    def with_other(merge, pick):
        def collective(flat):
            calls.append(flat.shape)
            return merge(flat, pick(halves[1]))

        return collective

    reduced = halves[0].reduce(
        with_other(torch.add, lambda s: torch.cat(list(s.sums.values()))),
        with_other(torch.maximum, lambda s: torch.stack(list(s.maxima.values()))),
    )
    assert len(calls) == 2
    for key, value in objective(*batch.arguments).metrics.items():
        torch.testing.assert_close(reduced.metrics()[key], value, msg=key)
