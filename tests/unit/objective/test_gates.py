"""The five gates: values by hand, derivatives by autograd, extremes, bad arguments."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_sspo.errors import UserError
from nemo_sspo.objective import GATES, gate_weight, log_gate

PAPER = ["expsig", "expatan", "gumbel", "siglog", "atanlog"]
EACH_GATE = pytest.mark.parametrize("name", PAPER)


def test_the_registry_holds_the_five_gates_of_the_paper():
    assert list(GATES)[:5] == PAPER


@pytest.mark.parametrize(
    ("name", "log_f", "weight"),
    [
        # rho = 2, tau = 1.5; sigmoid(1.5) = 0.8175744762, atan(1.5) = 0.9827937232, log 2 = 0.6931471806
        ("expsig", (4 / 1.5) * 0.3175744762, 2 * 4 * 0.8175744762 * 0.1824255238),
        ("expatan", 0.9827937232 / 1.5, 2 / (1 + 2.25)),
        ("gumbel", 1 - 0.3678794412, 2 * 0.3678794412),
        ("siglog", (4 / 1.5) * 0.2387961250, 4 * 0.7387961250 * 0.2612038750),
        ("atanlog", math.atan(1.0397207708) / 1.5, 1 / (1 + 1.0397207708**2)),
    ],
)
def test_values_by_hand(name, log_f, weight):
    x = torch.tensor([math.log(2.0)], dtype=torch.float64)
    assert log_gate(name, x, 1.5).item() == pytest.approx(log_f, abs=1e-9)
    assert gate_weight(name, x, 1.5).item() == pytest.approx(weight, abs=1e-9)


@pytest.mark.parametrize("tau", [0.2, 1.0, 10 / 3, 7.0])
@EACH_GATE
def test_weight_is_the_derivative_of_log_f(name, tau):
    x = torch.linspace(-8, 8, 801, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(log_gate(name, x, tau).sum(), x)
    torch.testing.assert_close(slope, gate_weight(name, x.detach(), tau), rtol=1e-10, atol=1e-13)


@EACH_GATE
def test_on_policy_a_gate_is_the_ratio_itself(name):
    zero = torch.zeros(1, dtype=torch.float64)
    assert log_gate(name, zero, 3.0).item() == 0.0
    assert gate_weight(name, zero, 3.0).item() == 1.0


@EACH_GATE
def test_small_log_ratios_lose_no_precision_in_float32(name):
    """(4/tau)(sigmoid(z) - 1/2), computed as written, is off by 1e-3 here."""
    x = torch.tensor([1e-6, -1e-6])
    torch.testing.assert_close(log_gate(name, x, 0.2), x, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("x", [50.0, -50.0, 1e4, -1e4])
@EACH_GATE
def test_extreme_ratios_stay_finite(name, x, dtype):
    log_ratio = torch.tensor([x], dtype=dtype, requires_grad=True)
    value = log_gate(name, log_ratio, 2.0)
    (slope,) = torch.autograd.grad(value.sum(), log_ratio)
    weight = gate_weight(name, log_ratio.detach(), 2.0)
    assert value.isfinite().all()
    assert slope.isfinite().all()
    assert 0 <= weight.item() < 1e-3


@pytest.mark.parametrize(
    ("given", "computed"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ],
)
@EACH_GATE
def test_dtypes(name, given, computed):
    x = torch.zeros(3, dtype=given)
    assert log_gate(name, x, 1.0).dtype == gate_weight(name, x, 1.0).dtype == computed
    assert log_gate(name, x, torch.tensor(1.0)).dtype == computed


@EACH_GATE
def test_tau_may_be_a_tensor(name):
    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)
    tau = torch.tensor([[0.5], [4.0]], dtype=torch.float64)
    for function in (log_gate, gate_weight):
        rows = torch.stack([function(name, x[0], 0.5), function(name, x[1], 4.0)])
        torch.testing.assert_close(function(name, x, tau), rows)


def test_bad_arguments():
    x = torch.zeros(1)
    with pytest.raises(UserError, match=r"model\.grpo\.objective\.gate: unknown 'atanlgo'.*Did you mean 'atanlog'"):
        log_gate("atanlgo", x)
    for tau in (0.0, -1.0, math.inf, math.nan, "1", True):
        with pytest.raises(UserError, match="temperature must be a finite number above 0"):
            gate_weight("atanlog", x, tau)
