"""Which examples make up a step, and how they are laid out. Nothing here has a state to save."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from nemo_sspo.data.dataset import EncodedProblem
from nemo_sspo.data.responses import ResponseBatch


def prompt_indices(seed: int, step: int, batch: int, size: int, shuffle: bool = True) -> Tensor:
    """The indices [batch] that step number `step` (from 0) takes of `size` examples.

    Steps walk through one seeded permutation after another, an epoch each: within an epoch no index repeats, and a
    step that reaches an epoch's end goes on into the next one. With `shuffle` False every epoch is in order. A
    function of its arguments alone, so a resumed run takes up where it stopped. ValueError for an argument out of
    range.
    """
    if step < 0 or batch < 1 or size < 1:
        raise ValueError(f"step >= 0, batch >= 1 and size >= 1 are needed, not {step}, {batch} and {size}")
    pieces, position, end = [], step * batch, (step + 1) * batch
    while position < end:
        epoch, start = divmod(position, size)
        stop = min(size, start + end - position)
        pieces.append(_epoch_order(seed, epoch, size, shuffle)[start:stop])
        position += stop - start
    return torch.cat(pieces)


def _epoch_order(seed: int, epoch: int, size: int, shuffle: bool) -> Tensor:
    if not shuffle:
        return torch.arange(size)
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    return torch.randperm(size, generator=generator)


def pad_sequences(sequences: Sequence[Sequence[int]], pad_id: int, multiple: int = 1) -> tuple[Tensor, Tensor]:
    """Right-padded tokens [B, S] and lengths [B], int64; S is the longest length rounded up to `multiple`.

    ValueError if there is nothing to pad.
    """
    if not sequences or multiple < 1:
        raise ValueError(f"at least one sequence and multiple >= 1 are needed, not {len(sequences)} and {multiple}")
    lengths = [len(sequence) for sequence in sequences]
    width = max(1, -(-max(lengths) // multiple)) * multiple
    tokens = torch.full((len(sequences), width), pad_id, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.as_tensor(sequence, dtype=torch.int64)
    return tokens, torch.tensor(lengths)


def sequence_batch(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], pad_id: int, multiple: int = 1
) -> ResponseBatch:
    """Lay out B prompts and their B responses (eos included). ValueError if there are none or not as many of each."""
    if len(prompts) != len(responses):
        raise ValueError(f"{len(prompts)} prompts but {len(responses)} responses")
    rows = [[*prompt, *response] for prompt, response in zip(prompts, responses, strict=True)]
    tokens, _ = pad_sequences(rows, pad_id, multiple)
    return ResponseBatch(tokens, torch.tensor([len(p) for p in prompts]), torch.tensor([len(r) for r in responses]))


def supervised_batch(examples: Sequence[EncodedProblem], pad_id: int, multiple: int = 1) -> ResponseBatch:
    """Lay out B cold-start examples. ValueError if there are none or one has no worked response."""
    responses = [example.sft_ids for example in examples if example.sft_ids is not None]
    if len(responses) != len(examples):
        raise ValueError(f"{len(examples) - len(responses)} of {len(examples)} examples have no worked response")
    return sequence_batch([example.prompt_ids for example in examples], responses, pad_id, multiple)
