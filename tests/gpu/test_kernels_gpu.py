"""Log-probs and objectives on a GPU against float64 on the CPU."""

from __future__ import annotations

import pytest
import torch

from nemo_sspo.objective import OBJECTIVES, build_objective
from nemo_sspo.parallel import linear_logprobs
from tests.numerics.batches import random_batch

TOLERANCE = {torch.float32: 2e-4, torch.bfloat16: 5e-2}


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["float32", "bfloat16"])
def test_linear_logprobs(dtype):
    generator = torch.Generator().manual_seed(0)
    hidden = (0.1 * torch.randn(65, 256, generator=generator)).to(dtype)
    weight = torch.randn(3001, 256, generator=generator).to(dtype)
    targets = torch.randint(0, 3001, (65,), generator=generator)

    def run(device: str, work: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.clone().to(device, work).requires_grad_() for t in (hidden, weight)]
        logprobs, entropy = linear_logprobs(*leaves, targets.to(device), chunk_size=16)
        (logprobs.sum() + 0.1 * entropy.sum()).backward()
        return [t.detach().double().cpu() for t in (logprobs, entropy, *(leaf.grad for leaf in leaves))]

    for found, expected in zip(run("cuda", dtype), run("cpu", torch.float64), strict=True):
        scale = expected.abs().max()
        assert (found - expected).abs().max() <= TOLERANCE[dtype] * scale


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_objectives(name):
    objective = build_objective({"name": name})
    here = random_batch()
    expected = objective(*here.arguments)
    expected.loss.backward()
    there = [t.detach().cuda() for t in here.arguments]
    policy = there[0].requires_grad_()
    out = objective(policy, *there[1:])
    out.loss.backward()
    torch.testing.assert_close(out.loss.cpu(), expected.loss, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(policy.grad.cpu(), here.policy.grad, rtol=1e-9, atol=1e-12)
