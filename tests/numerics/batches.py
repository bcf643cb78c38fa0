"""Random batches and layouts for the numeric tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_sspo.objective import OBJECTIVES, Objective, build_objective

ALL = sorted(OBJECTIVES)
EVERY_CASE = [
    *({"name": name} for name in ALL),
    *({"name": "sspo", "gate": gate} for gate in ("expsig", "expatan", "gumbel", "siglog")),
    {"name": "sspo", "preset": "paper_literal"},
    {"name": "grpo", "clip_low": 0.1, "clip_high": 0.5},
    {"name": "gspo", "clip_low": 0.1, "clip_high": 0.2},
    {"name": "gspo_token", "clip_low": 0.1, "clip_high": 0.2},
    {"name": "luspo", "clip_low": 0.1, "clip_high": 0.2, "length_scale": 4.0},
    {"name": "gmpo", "clip_low": 0.2, "clip_high": 0.3},
    {"name": "cispo", "clip_low": 0.2, "clip_high": 0.3},
    {"name": "dr_grpo", "length_scale": 8.0},
    {"name": "rloo", "length_scale": 8.0},
    {"name": "vespo", "k_pos": 1.0, "lambda_pos": 0.5, "k_neg": 0.0, "lambda_neg": 1.5},
]


def case_id(options: dict) -> str:
    return "-".join(f"{value}" if key in ("name", "gate", "preset") else key for key, value in options.items())


@dataclass
class Batch:
    policy: Tensor
    old: Tensor
    advantages: Tensor
    mask: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.policy, self.old, self.advantages, self.mask


def random_batch(
    rows: int = 6, width: int = 7, seed: int = 0, dtype: torch.dtype = torch.float64, spread: float = 0.5
) -> Batch:
    """Both signs of advantages, one zero advantage, ragged lengths with holes and one row without tokens."""
    generator = torch.Generator().manual_seed(seed)
    old = -torch.rand(rows, width, generator=generator, dtype=torch.float64) * 3
    policy = old + spread * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    advantages = torch.randn(rows, generator=generator, dtype=torch.float64)
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[:, 0] = True
    if rows > 2:
        advantages[1], mask[2] = 0.0, False
    return Batch(policy.to(dtype).requires_grad_(), old.to(dtype), advantages.to(dtype), mask)


def loss_and_gradient(objective: Objective, batch: Batch, **arguments) -> tuple[Tensor, Tensor]:
    loss = objective(*batch.arguments, **arguments).loss
    (gradient,) = torch.autograd.grad(loss, batch.policy)
    return loss.detach(), gradient


def pack(batch: Batch, slack: int = 2) -> tuple[Batch, Tensor, Tensor]:
    """The rows one after the other, cut to different lengths, with `slack` tokens of junk behind the last.

    Returns the packed batch (policy is a new leaf), cu_seqlens, and the flat index of each packed token but the junk.
    """
    width = batch.mask.shape[1]
    keep = [int(row.nonzero().max()) + 1 if row.any() else 0 for row in batch.mask]
    index = torch.cat([torch.arange(length) + i * width for i, length in enumerate(keep)])
    cu_seqlens = torch.tensor([0, *keep]).cumsum(0)

    def gather(values: Tensor, junk: float) -> Tensor:
        return torch.cat([values.detach().flatten()[index], torch.full((slack,), junk).to(values.dtype)])

    packed = Batch(
        gather(batch.policy, float("nan")).requires_grad_(),
        gather(batch.old, 1e9),
        batch.advantages,
        gather(batch.mask, 0),
    )
    return packed, cu_seqlens, index


def default_options(options: dict) -> dict:
    """Every option of a case, defaults filled in."""
    return {"name": options["name"], **build_objective(options).options}
