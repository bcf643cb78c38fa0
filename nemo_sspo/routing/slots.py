"""Where the tokens of a micro-batch lie in the order in which a router sees them.

A router flattens ``[S, B, H]``: slot ``s * B + b`` of a padded batch, and the position itself of a packed one, whose B
is 1. Sequence parallelism cuts both into runs of equally many slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_sspo.routing.routes import RouteFormat


@dataclass(frozen=True)
class Slots:
    """The slots ``[N]`` of all tokens, response by response, among `total`; the rest is padding. On the CPU."""

    slots: Tensor
    lengths: list[int]  # tokens of each response, its prompt included
    total: int

    @classmethod
    def padded(cls, lengths: Sequence[int], rows: int, columns: int) -> Slots:
        """Responses at the top of a batch ``[rows, columns]``, each padded on the right."""
        slots = [torch.arange(length) * rows + row for row, length in enumerate(lengths)]
        return cls(_cat(slots), list(lengths), rows * columns)

    @classmethod
    def packed(cls, lengths: Sequence[int], padded_lengths: Sequence[int], total: int) -> Slots:
        """Responses one after another in a row of `total` tokens, each padded on the right to its padded length."""
        starts = torch.tensor([0, *padded_lengths]).cumsum(0).tolist()
        slots = [torch.arange(length) + start for length, start in zip(lengths, starts, strict=False)]
        return cls(_cat(slots), list(lengths), total)

    def place(self, routes: Sequence[Tensor], form: RouteFormat, layers: Sequence[int]) -> Tensor:
        """What the routers of some layers replay, ``[total, len(layers), K]``.

        Tokens beyond the rows of their response's `routes` have no route. Padding has distinct experts that go round
        all of them, so that no rank's experts get more of it than another's.

        Args:
            routes: storage ``[tokens, L, K]`` of each response.
            form: of the routes.
            layers: indices into ``form.layers``.

        Raises:
            ValueError: more routes than tokens; it names the response.
        """
        for i, (length, route) in enumerate(zip(self.lengths, routes, strict=True)):
            if len(route) > length:
                raise ValueError(f"response {i} of the micro-batch has {length} tokens but {len(route)} rows of routes")
        choices = torch.arange(self.total * form.topk).view(self.total, 1, form.topk) % form.num_experts
        ids = choices.to(form.dtype).repeat(1, len(layers), 1)
        ids[self.slots] = form.missing
        routed = [s[: len(r)] for s, r in zip(self.slots.split(self.lengths), routes, strict=True)]
        ids[_cat(routed)] = torch.cat([route[:, list(layers)] for route in routes]) if routes else ids[:0]
        return ids

    def matter(self) -> Tensor:
        """bool ``[total]``: the tokens that a loss depends on, all but padding and each response's last."""
        flags = torch.zeros(self.total, dtype=torch.bool)
        flags[_cat([slots[:-1] for slots in self.slots.split(self.lengths)])] = True
        return flags

    def take(self, values: Tensor) -> Tensor:
        """The rows of the tokens, response by response: ``[total, ...] -> [N, ...]``."""
        return values[self.slots.to(values.device)]


def _cat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(list(parts)) if parts else torch.zeros(0, dtype=torch.int64)
