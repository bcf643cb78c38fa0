"""Conditions (i) to (iv), and gates of one's own."""

from __future__ import annotations

import pytest
import torch

from nemo_sspo.errors import UserError
from nemo_sspo.objective import GATES, Gate, bounded_exp, build_objective, check_conditions, gate_weight, register_gate

KINDS = {"expsig": "iii.1", "expatan": "iii.1", "gumbel": "iii.2", "siglog": "iii.2", "atanlog": "iii.2"}


@pytest.fixture
def registry():
    before = dict(GATES)
    yield GATES
    GATES.clear()
    GATES.update(before)


@pytest.mark.parametrize("name", KINDS)
def test_the_papers_gates_meet_every_condition(name):
    report = check_conditions(GATES[name], temperatures=(0.2, 1.0, 10 / 3, 5.0, 10.0))
    assert report.failures == {}
    assert report.ok
    assert report.kind == GATES[name].kind == KINDS[name]


@pytest.mark.parametrize(
    ("log_f", "condition", "words"),
    [
        (lambda x, tau: x.clamp(-0.4, 0.4), "i", "f' jumps at log rho = -0.4 (ratio 0.67)"),
        (lambda x, tau: x.clamp(max=0.4), "i", "f' jumps at log rho = 0.4"),
        (lambda x, tau: torch.atan(x) + 0.1 * (x > 2), "i", "f jumps at log rho = 2"),
        (lambda x, tau: torch.atan(2 * x), "ii", "f'(1) = 2"),
        (lambda x, tau: torch.atan(x) + 0.5, "ii", "log f(1) = 0.5"),
        (lambda x, tau: x, "iii", "w does not vanish as rho grows: w = 1 at log rho = 1e+04"),
        (lambda x, tau: torch.atan(x - 1) * 2 + 1.5707963267948966, "iii", "w rises at log rho = 0.422 (ratio 1.53)"),
        (lambda x, tau: x * torch.exp(-x.square()), "iv", "f decreases at log rho = -1.23 (ratio 0.294)"),
        (lambda x, tau: 1 - torch.exp(1 - x.exp()), "finite", "not finite at log rho = 1e+04"),
    ],
    ids=[
        "hard clip",
        "one-sided clip",
        "step",
        "slope 2",
        "offset",
        "rho itself",
        "bell elsewhere",
        "falls",
        "overflows",
    ],
)
def test_a_gate_that_fails_is_refused_with_the_condition(registry, log_f, condition, words):
    with pytest.raises(UserError) as error:
        register_gate("mine", log_f)
    assert f"({condition}) " in str(error.value)
    assert words in str(error.value)
    assert "mine" not in registry


@pytest.mark.parametrize(
    ("log_f", "words"),
    [
        (lambda x, tau: x.clamp(-0.4, 0.4), "w is flat from rho = 1 to log rho = -0.1 (ratio 0.905)"),
        (lambda x, tau: torch.where(x > 0, torch.atan(x), x), "w is flat from rho = 1 to log rho = -0.1"),
    ],
)
def test_condition_iii_says_what_is_no_bell(log_f, words):
    report = check_conditions(Gate("mine", log_f, log_f, "iii.2", uses_tau=False))
    assert words in report.failures["iii"]


def test_a_weight_that_is_not_the_derivative_is_refused(registry):
    with pytest.raises(UserError, match=r"\(weight\) the weight is not the derivative of log f"):
        register_gate("mine", lambda x, tau: torch.atan(tau * x) / tau, lambda x, tau: 1 / (1 + (tau * x).abs()))


@pytest.mark.parametrize("own_weight", [True, False], ids=["own weight", "weight by autograd"])
def test_a_gate_that_passes_can_be_used(registry, own_weight):
    """log f = tanh(tau x) / tau; twice the temperature of siglog, which is tanh(tau x / 2) * 2 / tau."""
    weight = (lambda x, tau: 1 - torch.tanh(tau * x).square()) if own_weight else None
    gate = register_gate("tanhlog", lambda x, tau: torch.tanh(tau * x) / tau, weight, formula="tanh(tau log rho) / tau")
    assert gate.kind == "iii.2"
    x = torch.linspace(-2, 2, 9, dtype=torch.float64)
    torch.testing.assert_close(gate_weight("tanhlog", x, 1.5), gate_weight("siglog", x, 3.0))
    policy = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    arguments = (torch.zeros_like(policy), torch.tensor([1.0, -1.0]), torch.ones(2, 3))
    mine = build_objective({"name": "sspo", "gate": "tanhlog", "tau_pos": 1.5, "tau_neg": 2.0})
    papers = build_objective({"name": "sspo", "gate": "siglog", "tau_pos": 3.0, "tau_neg": 4.0})
    torch.testing.assert_close(mine(policy, *arguments).loss, papers(policy, *arguments).loss)
    with pytest.raises(UserError, match="the name 'tanhlog' is taken"):
        register_gate("tanhlog", lambda x, tau: torch.tanh(x))


def test_a_gate_of_rho_without_temperature(registry):
    gate = register_gate("own_gumbel", lambda x, tau: 1 - torch.exp(1 - bounded_exp(x)), uses_tau=False)
    assert gate.kind == "iii.2"
    assert not gate.uses_tau
