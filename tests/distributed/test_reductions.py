"""Collectives on two and three ranks, by value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from nemo_sspo.errors import UserError
from nemo_sspo.parallel.ranks import on_rank_zero
from nemo_sspo.parallel.reductions import (
    all_gather_list,
    all_gather_rows,
    any_rank,
    local_share,
    sum_over_ranks,
)
from tests.distributed.launch import run_ranks


def worker(rank: int, size: int) -> dict[str, Any]:
    group = dist.group.WORLD
    value = torch.tensor([float(rank + 1)], requires_grad=True)
    (sum_over_ranks(value, group) * (rank + 1)).sum().backward()

    def refuse() -> None:
        raise UserError("rank 0 says no")

    try:
        on_rank_zero(refuse)
        refusal = None
    except UserError as error:
        refusal = str(error)
    return {
        "share": list(range(7))[local_share(7, group)],
        "rows": all_gather_rows(torch.full((rank + 1, 2 - rank % 2), float(rank)), group, pad=-1.0).tolist(),
        "list": all_gather_list([rank] * rank, group),
        "any": (any_rank(rank == 1, group), any_rank(False, group)),
        "gradient": value.grad.item(),
        "refusal": refusal,
        "result": on_rank_zero(lambda: "made"),
    }


@pytest.mark.parametrize("size", [2, 3])
def test_by_value(tmp_path, size):
    found = run_ranks(worker, size, tmp_path)
    assert [row for f in found for row in f["share"]] == list(range(7))
    assert max(len(f["share"]) for f in found) - min(len(f["share"]) for f in found) <= 1
    rows = [[0, 0], [1, -1], [1, -1], [2, 2], [2, 2], [2, 2]][: 3 if size == 2 else 6]
    for rank, f in enumerate(found):
        assert f["rows"] == rows
        assert f["list"] == [r for r in range(size) for _ in range(r)]
        assert f["any"] == (True, False)
        assert f["gradient"] == sum(range(1, size + 1))
        assert f["refusal"] == "rank 0 says no"
        assert f["result"] == ("made" if rank == 0 else None)
