"""Prompt-and-response batches, and the one place where tokens and log-probabilities are shifted by one.

Everywhere else, column t of a ``[B, T]`` tensor belongs to token t of the response.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import torch
from torch import Tensor

from nemo_sspo.parallel import IGNORE_INDEX

SEQUENCE = {"axis": "sequence"}  # [B, S]: prompt and response
RESPONSE = {"axis": "response"}  # [B, T]: response only

BatchT = TypeVar("BatchT", bound="ResponseBatch")


@dataclass(frozen=True)
class ResponseBatch:
    """B prompts with one response each, right-padded: prompt tokens, then response tokens, then padding.

    A subclass adds fields of B rows (tensors or lists). Those that lie along the sequence or along the response say so
    in their metadata (`SEQUENCE`, `RESPONSE`), so that `select` can cut padding from all of them alike.
    """

    tokens: Tensor = field(metadata=SEQUENCE)  # [B, S] int64
    prompt_lengths: Tensor  # [B] int64, at least 1
    response_lengths: Tensor  # [B] int64
    # with routing replay: the experts that each response's tokens go to, [up to its tokens, L, K] (nemo_sspo/routing)
    routes: list[Tensor] | None = field(default=None, kw_only=True)

    def __len__(self) -> int:
        return self.tokens.shape[0]

    @property
    def max_response_length(self) -> int:
        """T, the number of response columns."""
        return int(self.response_lengths.max()) if len(self) else 0

    @property
    def mask(self) -> Tensor:
        """[B, T] float32: 1 on response tokens, 0 on padding."""
        columns = torch.arange(self.max_response_length, device=self.tokens.device)
        return (columns < self.response_lengths[:, None]).float()

    @property
    def num_tokens(self) -> int:
        """Response tokens in the batch."""
        return int(self.response_lengths.sum())

    def to(self: BatchT, device: torch.device) -> BatchT:
        """The same batch with its tensors on `device`."""
        moved = {
            f.name: getattr(self, f.name).to(device) for f in fields(self) if isinstance(getattr(self, f.name), Tensor)
        }
        return replace(self, **moved)

    def select(self: BatchT, rows: Tensor | slice) -> BatchT:
        """The rows given, without the padding columns that none of them needs."""
        picked: dict = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, Tensor):
                picked[f.name] = value[rows]
            elif isinstance(value, list):
                picked[f.name] = [value[i] for i in torch.arange(len(value))[rows].tolist()]
        batch = replace(self, **picked)
        lengths = {
            "sequence": int((batch.prompt_lengths + batch.response_lengths).max()) if len(batch) else 0,
            "response": batch.max_response_length,
        }
        cut = {
            f.name: getattr(batch, f.name)[:, : lengths[f.metadata["axis"]]]
            for f in fields(batch)
            if "axis" in f.metadata and getattr(batch, f.name) is not None
        }
        return replace(batch, **cut)

    def split(self: BatchT, rows: int) -> list[BatchT]:
        """Consecutive pieces of at most `rows` rows; at least one piece, be it empty."""
        return [self.select(slice(start, start + rows)) for start in range(0, max(len(self), 1), rows)]


def pad_tokens(tokens: Tensor, rows: int, columns: int, multiple: int = 1) -> Tensor:
    """Tokens ``[B, S]``, padded with id 0 to at least `rows` and `columns`, and to a multiple of `multiple` columns."""
    rows, columns = max(rows, tokens.shape[0]), max(columns, tokens.shape[1])
    columns += -columns % multiple
    return torch.nn.functional.pad(tokens, (0, columns - tokens.shape[1], 0, rows - tokens.shape[0]))


def response_targets(batch: ResponseBatch) -> Tensor:
    """[B, T] int64: the response's tokens, `IGNORE_INDEX` on padding."""
    columns = torch.arange(batch.max_response_length, device=batch.tokens.device)
    positions = (batch.prompt_lengths[:, None] + columns).clamp(max=max(batch.tokens.shape[1] - 1, 0))
    targets = batch.tokens.gather(1, positions)
    return targets.masked_fill(columns >= batch.response_lengths[:, None], IGNORE_INDEX)


def response_rows(values: Tensor, batch: ResponseBatch) -> Tensor:
    """From ``[B, S, ...]`` by position to ``[B, T, ...]``: row t is what predicts token t of the response.

    A causal model's output at position p predicts the token at p + 1, so token t of the response (position
    ``prompt_length + t``) is predicted at ``prompt_length - 1 + t``. Padding columns repeat some row of the sequence;
    their targets are `IGNORE_INDEX`. Differentiable in `values`.
    """
    columns = torch.arange(batch.max_response_length, device=batch.tokens.device)
    positions = (batch.prompt_lengths[:, None] - 1 + columns).clamp(max=max(values.shape[1] - 1, 0))
    index = positions.view(*positions.shape, *([1] * (values.dim() - 2))).expand(-1, -1, *values.shape[2:])
    return values.gather(1, index)
