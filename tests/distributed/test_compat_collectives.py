"""Megatron-Core's collectives over gloo: what gloo refuses, and that the patched ones take it, by value.

Sums over parts of different sizes are scattered by the gloo of PyTorch 2.13, too; that of older ones has no
reduce-scatter of lists.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a machine with a GPU nothing is patched")

WIDTH = 3


def part(rank: int, rows: int) -> Tensor:
    """Rows that say where they come from: 100 for the rank, 10 for the row, 1 for the column."""
    return (100 * rank + 10 * torch.arange(rows)[:, None] + torch.arange(WIDTH)).double()


def sizes(size: int, uneven: bool) -> list[int]:
    """The rows of each rank's part; uneven ones include a part without any."""
    return [(rank + 2) % size if uneven else 2 for rank in range(size)]


def splits(rank: int, size: int) -> tuple[list[int], list[int]]:
    """What each rank gets from, and gives to, the others in an all-to-all: ``(i + 2 j) % 3`` rows from i to j."""
    return [(i + 2 * rank) % 3 for i in range(size)], [(rank + 2 * j) % 3 for j in range(size)]


def gradient(tensor: Tensor) -> list:
    assert tensor.grad is not None
    return tensor.grad.tolist()


def patched(rank: int, size: int) -> dict[Any, Any]:
    """Through the functions of Megatron-Core that the token dispatcher calls; gradients as well."""
    from nemo_sspo.compat import megatron_cpu

    assert megatron_cpu.install()
    from megatron.core.tensor_parallel import mappings

    group = dist.group.WORLD
    found: dict[Any, Any] = {}
    for uneven in (False, True):
        rows = sizes(size, uneven)
        own = part(rank, rows[rank]).requires_grad_()
        gathered = mappings.gather_from_sequence_parallel_region(own, group=group, output_split_sizes=rows)
        (gathered * (rank + 1)).sum().backward()
        found["gather", uneven] = gathered.tolist(), gradient(own)
        whole = part(rank, sum(rows)).requires_grad_()
        scattered = mappings.reduce_scatter_to_sequence_parallel_region(whole, group=group, input_split_sizes=rows)
        (scattered * (rank + 1)).sum().backward()
        found["scatter", uneven] = scattered.tolist(), gradient(whole)
    got, given = splits(rank, size)
    for form in (list, torch.tensor):
        own = part(rank, sum(given)).requires_grad_()
        exchanged = mappings.all_to_all(group, own, form(got), form(given))
        (exchanged * (rank + 1)).sum().backward()
        found["exchange", form is torch.tensor] = exchanged.tolist(), gradient(own)
    own = part(rank, size).requires_grad_()
    found["exchange", None] = mappings.all_to_all(group, own).tolist()
    return found


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request, tmp_path_factory) -> list[dict[Any, Any]]:
    return run_ranks(patched, request.param, tmp_path_factory.mktemp("collectives"))


def ones(rows: int, factor: float = 1.0) -> Tensor:
    return torch.full((rows, WIDTH), factor, dtype=torch.float64)


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_parts_are_gathered(ranks, uneven):
    rows = sizes(len(ranks), uneven)
    everything = torch.cat([part(rank, rows[rank]) for rank in range(len(ranks))])
    for rank, found in enumerate(ranks):
        value, gradient = found["gather", uneven]
        assert value == everything.tolist()
        assert gradient == ones(rows[rank], sum(range(1, len(ranks) + 1))).tolist()


@pytest.mark.parametrize("uneven", [False, True], ids=["even", "uneven"])
def test_sums_are_scattered(ranks, uneven):
    rows = sizes(len(ranks), uneven)
    total = torch.stack([part(rank, sum(rows)) for rank in range(len(ranks))]).sum(0)
    slope = torch.cat([ones(n, rank + 1) for rank, n in enumerate(rows)])
    for rank, found in enumerate(ranks):
        value, gradient = found["scatter", uneven]
        assert value == total.split(rows)[rank].tolist()
        assert gradient == slope.tolist()


@pytest.mark.parametrize("as_tensors", [False, True])
def test_rows_are_exchanged(ranks, as_tensors):
    size = len(ranks)
    given = [splits(rank, size)[1] for rank in range(size)]
    parts = [part(rank, sum(given[rank])).split(given[rank]) for rank in range(size)]
    for rank, found in enumerate(ranks):
        value, gradient = found["exchange", as_tensors]
        assert value == torch.cat([parts[other][rank] for other in range(size)]).tolist()
        assert gradient == torch.cat([ones(n, other + 1) for other, n in enumerate(given[rank])]).tolist()
        equal = [part(other, size).split(1)[rank] for other in range(size)]
        assert found["exchange", None] == torch.cat(equal).tolist()


def gather_uneven(rank: int, size: int) -> None:
    outputs = [torch.empty(other + 1, WIDTH) for other in range(size)]
    dist.all_gather(outputs, torch.ones(rank + 1, WIDTH))


def exchange_by_tensors(rank: int, size: int) -> None:
    ones = torch.ones(size, dtype=torch.int64)
    dist.all_to_all_single(torch.empty(size, WIDTH), torch.ones(size, WIDTH), ones, ones)


def refusal(rank: int, size: int, collective: Callable[[int, int], None]) -> str:
    try:
        collective(rank, size)
    except (RuntimeError, TypeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("collective", "message"),
    [(gather_uneven, "invalid tensor size"), (exchange_by_tensors, "incompatible function arguments")],
)
def test_gloo_itself_still_refuses(collective, message, tmp_path):
    for error in run_ranks(refusal, 2, tmp_path, collective):
        assert re.search(message, error), f"gloo took it ({error!r}): remove the patch of {collective.__name__}"
