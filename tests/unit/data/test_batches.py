"""Which examples a step takes, and how they are laid out."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_sspo.data import EncodedProblem, pad_sequences, prompt_indices, sequence_batch, supervised_batch


def walk(steps: int, batch: int, size: int, seed: int = 1, shuffle: bool = True) -> list[int]:
    return [i for step in range(steps) for i in prompt_indices(seed, step, batch, size, shuffle).tolist()]


def test_in_order():
    assert [prompt_indices(0, step, 3, 7, shuffle=False).tolist() for step in range(4)] == [
        [0, 1, 2],
        [3, 4, 5],
        [6, 0, 1],
        [2, 3, 4],
    ]
    assert prompt_indices(0, 1, 5, 2, shuffle=False).tolist() == [1, 0, 1, 0, 1]


@settings(deadline=None)
@given(st.integers(0, 2**63), st.integers(1, 9), st.integers(1, 9))
def test_each_epoch_is_a_permutation(seed, batch, size):
    taken = walk(3 * size, batch, size, seed)
    assert len(taken) == 3 * size * batch
    for epoch in range(3 * batch):
        assert sorted(taken[epoch * size : (epoch + 1) * size]) == list(range(size))


def test_epochs_and_seeds_differ_and_repeat():
    taken = walk(2, 50, 50)
    assert taken[:50] != taken[50:]
    assert taken[:50] != list(range(50))
    assert walk(2, 50, 50, seed=2) != taken
    assert walk(2, 50, 50) == taken
    assert prompt_indices(1, 1, 50, 50).tolist() == taken[50:]  # without the steps before it
    assert prompt_indices(1, 0, 4, 50).dtype == torch.int64


@pytest.mark.parametrize("arguments", [(0, -1, 1, 1), (0, 0, 0, 1), (0, 0, 1, 0)])
def test_prompt_indices_refuses(arguments):
    with pytest.raises(ValueError, match="are needed, not"):
        prompt_indices(*arguments)


def test_pad_sequences():
    tokens, lengths = pad_sequences([[5, 6, 7], [8], []], pad_id=9)
    assert tokens.tolist() == [[5, 6, 7], [8, 9, 9], [9, 9, 9]]
    assert lengths.tolist() == [3, 1, 0]
    assert tokens.dtype == lengths.dtype == torch.int64
    assert pad_sequences([[5, 6, 7]], 0, multiple=4)[0].tolist() == [[5, 6, 7, 0]]
    assert pad_sequences([[5, 6, 7, 8]], 0, multiple=4)[0].shape == (1, 4)
    assert pad_sequences([[5, 6, 7, 8, 9]], 0, multiple=4)[0].shape == (1, 8)
    assert pad_sequences([[]], 0, multiple=4)[0].tolist() == [[0, 0, 0, 0]]


def test_pad_sequences_refuses():
    with pytest.raises(ValueError, match="not 0 and 1"):
        pad_sequences([], 0)
    with pytest.raises(ValueError, match="not 1 and 0"):
        pad_sequences([[1]], 0, multiple=0)


def test_layout():
    batch = sequence_batch([[3, 4], [5]], [[6, 1], [7, 8, 9, 1]], pad_id=0, multiple=8)
    assert batch.tokens.tolist() == [[3, 4, 6, 1, 0, 0, 0, 0], [5, 7, 8, 9, 1, 0, 0, 0]]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.response_lengths.tolist() == [2, 4]
    with pytest.raises(ValueError, match="2 prompts but 1 responses"):
        sequence_batch([[1], [2]], [[3]], 0)


def test_supervised_batch():
    examples = [EncodedProblem([3, 4], "1", "q", [6, 1]), EncodedProblem([5], "2", "r", [7, 8, 9, 1])]
    batch = supervised_batch(examples, pad_id=0)
    assert batch.tokens.tolist() == [[3, 4, 6, 1, 0], [5, 7, 8, 9, 1]]
    assert batch.prompt_lengths.tolist() == [2, 1]
    assert batch.response_lengths.tolist() == [2, 4]
    with pytest.raises(ValueError, match="1 of 3 examples have no worked response"):
        supervised_batch([*examples, EncodedProblem([5], "2", "r")], pad_id=0)
    with pytest.raises(ValueError, match="at least one sequence"):
        supervised_batch([], pad_id=0)
