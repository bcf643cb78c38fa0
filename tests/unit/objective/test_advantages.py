"""Group advantages by value."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_sspo.errors import UserError
from nemo_sspo.objective import ADVANTAGES, count_equal_groups, group_advantages

REWARDS = torch.tensor([[1.0, 0.0, 0.0, 1.0], [2.0, 0.0, 1.0, 1.0], [0.1, 0.1, 0.1, 0.1]], dtype=torch.float64)


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5], [1.0, -1.0, 0.0, 0.0]),
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3], [4 / 3, -4 / 3, 0.0, 0.0]),
        (
            "grpo",
            [s * 0.5 / (math.sqrt(1 / 3) + 1e-6) for s in (1, -1, -1, 1)],
            [s / (math.sqrt(2 / 3) + 1e-6) for s in (1, -1, 0, 0)],
        ),
    ],
)
def test_values_by_hand(kind, first, second):
    expected = torch.tensor([first, second, [0.0] * 4], dtype=torch.float64)
    torch.testing.assert_close(group_advantages(REWARDS, kind), expected, rtol=1e-12, atol=1e-15)


def test_rloo_is_the_reward_minus_the_mean_of_the_others():
    rewards = torch.rand(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    others = torch.stack([torch.cat([rewards[:, :i], rewards[:, i + 1 :]], 1).mean(1) for i in range(5)], 1)
    torch.testing.assert_close(group_advantages(rewards, "rloo"), rewards - others)


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_equal_groups_give_exact_zeros(kind):
    """Seven times 0.1 has a float32 mean other than 0.1; the std is then not 0 either."""
    rewards = torch.full((2, 7), 0.1)
    assert (group_advantages(rewards, kind) == 0).all()
    assert count_equal_groups(REWARDS) == 1


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_dtypes_and_gradient(kind):
    assert group_advantages(REWARDS, kind).dtype == torch.float64
    assert group_advantages(torch.tensor([[1, 0]]), kind).dtype == torch.float32
    assert group_advantages(REWARDS.bfloat16(), kind).dtype == torch.float32
    assert not group_advantages(REWARDS.clone().requires_grad_(), kind).requires_grad


@pytest.mark.parametrize("kind", ADVANTAGES)
def test_a_group_of_one_is_an_error(kind):
    with pytest.raises(ValueError, match="group of 1 has nothing to compare with"):
        group_advantages(torch.ones(3, 1), kind)


def test_no_prompts_give_no_advantages():
    assert group_advantages(torch.zeros(0, 4)).shape == (0, 4)


def test_bad_arguments():
    with pytest.raises(UserError, match=r"model\.grpo\.objective\.advantages: unknown 'gpro'.*Did you mean 'grpo'"):
        group_advantages(REWARDS, "gpro")
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        group_advantages(torch.ones(4))
    with pytest.raises(ValueError, match=r"1 non-finite value.* \(1, 0\)"):
        group_advantages(torch.tensor([[1.0, 0.0], [math.nan, 0.0]]))
