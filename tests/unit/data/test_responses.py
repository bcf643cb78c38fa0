"""Masks, the shift by one, and cutting batches, on a batch small enough to read."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch

from nemo_sspo.data.responses import IGNORE_INDEX, RESPONSE, ResponseBatch, pad_tokens, response_rows, response_targets
from tests.tiny import make_batch

BATCH = make_batch([[7], [5, 6, 9]], [[1, 2, 3], [4]])


def test_mask_is_one_on_response_tokens_only():
    assert BATCH.mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert BATCH.num_tokens == 4


def test_targets_are_the_response_tokens():
    assert response_targets(BATCH).tolist() == [[1, 2, 3], [4, IGNORE_INDEX, IGNORE_INDEX]]


def test_row_t_is_the_position_before_response_token_t():
    positions = torch.arange(4).expand(2, -1)[..., None]  # the value at a position is its number
    rows = response_rows(positions, BATCH)[..., 0]
    assert rows[0].tolist() == [0, 1, 2]  # prompt of one token: position 0 predicts response token 0
    assert rows[1, 0].item() == 2  # prompt of three tokens: position 2 predicts it


def test_rows_pass_gradient_to_the_positions_they_came_from():
    values = torch.zeros(2, 4, 1, requires_grad=True)
    (response_rows(values, BATCH)[..., 0] * BATCH.mask).sum().backward()
    assert values.grad is not None
    assert values.grad[..., 0].tolist() == [[1, 1, 1, 0], [0, 0, 1, 0]]


@dataclass(frozen=True)
class Rated(ResponseBatch):
    scores: torch.Tensor = field(metadata=RESPONSE)
    names: list[str]


def test_select_cuts_padding_from_every_field_alike():
    rated = Rated(BATCH.tokens, BATCH.prompt_lengths, BATCH.response_lengths, torch.arange(6).view(2, 3), ["a", "b"])
    picked = rated.select(torch.tensor([1]))
    assert picked.tokens.tolist() == [[5, 6, 9, 4]]
    assert picked.scores.tolist() == [[3]]  # T is now 1
    assert picked.names == ["b"]
    assert rated.select(torch.tensor([0])).tokens.tolist() == [[7, 1, 2, 3]]


def test_split_covers_all_rows_once_and_an_empty_batch_is_one_empty_piece():
    pieces = BATCH.split(1)
    assert [len(p) for p in pieces] == [1, 1]
    assert torch.cat([p.prompt_lengths for p in pieces]).tolist() == [1, 3]
    (empty,) = BATCH.select(slice(0, 0)).split(4)
    assert len(empty) == 0
    assert empty.mask.shape == (0, 0)


@pytest.mark.parametrize(
    ("rows", "columns", "multiple", "shape"),
    [
        (1, 1, 1, (2, 3)),
        (2, 3, 1, (2, 3)),
        (4, 3, 1, (4, 3)),
        (2, 5, 1, (2, 5)),
        (1, 1, 2, (2, 4)),
        (1, 1, 3, (2, 3)),
        (3, 5, 4, (3, 8)),
        (0, 0, 16, (2, 16)),
    ],
)
def test_tokens_are_padded_with_zeros_after_their_own(rows, columns, multiple, shape):
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    padded = pad_tokens(tokens, rows, columns, multiple)
    assert (padded.shape, padded.dtype) == (shape, torch.int64)
    assert torch.equal(padded[:2, :3], tokens)
    assert padded.sum() == tokens.sum()


def test_a_batch_without_rows_is_padded_as_well():
    assert pad_tokens(torch.zeros(0, 0, dtype=torch.int64), 2, 3, 4).tolist() == [[0] * 4] * 2
