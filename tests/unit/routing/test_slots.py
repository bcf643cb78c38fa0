"""Where tokens lie, padded and packed, against loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from nemo_sspo.routing.routes import RouteFormat
from nemo_sspo.routing.slots import Slots

FORM = RouteFormat((1, 2, 5), 8, 2)
MISSING = [255, 255]


def random_routes(lengths: list[int], seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.rand(n, 3, 8, generator=generator).argsort(-1)[..., :2].to(torch.uint8) for n in lengths]


lengths_of_rows = st.lists(st.integers(1, 6), min_size=1, max_size=4)


@settings(deadline=None, max_examples=40)
@given(lengths=lengths_of_rows, short=st.integers(0, 3), rows=st.integers(0, 2), columns=st.integers(0, 3))
def test_padded_rows_against_a_loop(lengths, short, rows, columns):
    rows, columns = len(lengths) + rows, max(lengths) + columns
    routes = random_routes([max(n - short, 0) for n in lengths])
    slots = Slots.padded(lengths, rows, columns)
    placed, matter = slots.place(routes, FORM, [2, 0]), slots.matter()
    for s in range(columns):
        for b in range(rows):
            slot = s * rows + b
            length = lengths[b] if b < len(lengths) else 0
            if s < length:
                known = s < len(routes[b])
                assert placed[slot].tolist() == (routes[b][s, [2, 0]].tolist() if known else [MISSING] * 2)
            else:
                assert all(len(set(ids)) == 2 and max(ids) < 8 for ids in placed[slot].tolist())
            assert bool(matter[slot]) == (s < length - 1)


@settings(deadline=None, max_examples=40)
@given(lengths=lengths_of_rows, align=st.integers(1, 4), tail=st.integers(0, 3))
def test_packed_rows_against_a_loop(lengths, align, tail):
    padded = [n + -n % align for n in lengths]
    routes, total = random_routes(lengths), sum(padded) + tail
    slots = Slots.packed(lengths, padded, total)
    placed, slot = slots.place(routes, FORM, [0, 1, 2]), 0
    for i, (length, width) in enumerate(zip(lengths, padded, strict=True)):
        for s in range(width):
            if s < length:
                assert torch.equal(placed[slot], routes[i][s])
            else:
                assert all(len(set(ids)) == 2 for ids in placed[slot].tolist())
            slot += 1
    assert len(placed) == total
    assert int(slots.matter().sum()) == sum(n - 1 for n in lengths)


@pytest.mark.parametrize("rows", [1, 3])
def test_take_brings_back_what_was_placed(rows):
    lengths = [4, 2, 5][:rows]
    routes = random_routes(lengths)
    for slots in (Slots.padded(lengths, 4, 6), Slots.packed(lengths, [6] * rows, 20)):
        assert torch.equal(slots.take(slots.place(routes, FORM, range(3))), torch.cat(routes))


def test_padding_goes_evenly_to_all_experts():
    """And so to all ranks, which hold runs of experts; under sequence parallelism each part of it does, too."""
    placed = Slots.padded([1], 1, 33).place(random_routes([1]), FORM, [0])[1:, 0]
    for part in (placed, *placed.chunk(4)):
        assert torch.bincount(part.flatten().long(), minlength=8).tolist() == [len(part) * 2 // 8] * 8


def test_more_routes_than_tokens_are_refused():
    with pytest.raises(ValueError, match="response 1 of the micro-batch has 2 tokens but 3 rows of routes"):
        Slots.padded([3, 2], 2, 4).place(random_routes([3, 3]), FORM, [0])


def test_a_micro_batch_without_rows():
    slots = Slots.padded([], 2, 4)
    placed = slots.place([], FORM, [0, 1, 2])
    assert placed.shape == (8, 3, 2)
    assert not slots.matter().any()
    assert len(slots.take(placed)) == 0
