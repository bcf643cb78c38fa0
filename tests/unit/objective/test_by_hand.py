"""Two responses of three tokens, worked out by hand, and the metrics that go with them.

    row  advantage  ratios            geometric mean
    0    +1         2, 1, 1/2         1
    1    -2         4, 1, (masked)    2

All log-probs of the old policy are -1, so log pi = log rho - 1.
"""

from __future__ import annotations

import math

import pytest
import torch

from nemo_sspo.objective import build_objective

LOG2 = math.log(2)
X = torch.tensor([[LOG2, 0.0, -LOG2], [2 * LOG2, 0.0, 99.0]], dtype=torch.float64)
OLD = torch.full_like(X, -1.0)
ADVANTAGES = torch.tensor([1.0, -2.0])
MASK = torch.tensor([[1, 1, 1], [1, 1, 0]])


def phi(w, k, decay):
    return w**k * math.exp(decay * (1 - w))


@pytest.mark.parametrize(
    ("options", "loss"),
    [
        # atan is odd: row 0 has F = 1; row 1 has F = exp(atan(2 log 2) / 2). Mean over two responses.
        ({"name": "sspo", "tau_pos": 1.0, "tau_neg": 1.0}, -(1 - 2 * math.exp(math.atan(2 * LOG2) / 2)) / 2),
        # row 0: min(2, 1.2), 1, 1/2; row 1: 4 and 1, for a negative advantage the upper clip does not act.
        ({"name": "grpo"}, -((1.2 + 1 + 0.5) / 3 - 2 * 5 / 2) / 2),
        ({"name": "dapo"}, -((1.28 + 1 + 0.5) - 2 * 5) / 5),
        ({"name": "dr_grpo", "length_scale": 3.0}, -((1.2 + 1 + 0.5) - 2 * 5) / 2 / 3),
        ({"name": "gspo"}, -(1 - 2 * 2) / 2),
        ({"name": "gspo_token"}, -(1 - 2 * 2) / 2),
        ({"name": "luspo"}, -(3 * 1 - 2 * 2 * 2) / 2),
        # row 0: log 2 is cut to 0.4, -log 2 is not; row 1: no cut from above.
        ({"name": "gmpo"}, -(math.exp((0.4 - LOG2) / 3) - 2 * 2) / 2),
        (
            {"name": "sapo", "tau_pos": 1.0, "tau_neg": 1.0},
            -(
                4 * (1 / (1 + math.exp(-1)) + 0.5 + 1 / (1 + math.exp(0.5))) / 3
                - 2 * 4 * (1 / (1 + math.exp(-3)) + 0.5) / 2
            )
            / 2,
        ),
        (
            {"name": "cispo", "clip_high": 2.0},
            -((2 * (LOG2 - 1) - 1 + 0.5 * (-LOG2 - 1)) - 2 * (3 * (2 * LOG2 - 1) - 1)) / 5,
        ),
        ({"name": "rloo"}, -(-3 - 2 * (2 * LOG2 - 2)) / 2),
        # W is 1 and 4.
        ({"name": "vespo"}, -(-3 - 2 * phi(4, 3, 2) * (2 * LOG2 - 2)) / 5),
    ],
    ids=lambda value: value["name"] if isinstance(value, dict) else "",
)
def test_loss(options, loss):
    assert build_objective(options)(X + OLD, OLD, ADVANTAGES, MASK).loss.item() == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("sspo", [[1 / (1 + LOG2**2), 1, 1 / (1 + LOG2**2)], [1 / (1 + 4 * (2 * LOG2) ** 2), 1, 0]]),
        ("grpo", [[0, 1, 0.5], [4, 1, 0]]),
        ("dapo", [[0, 1, 0.5], [4, 1, 0]]),
        ("dr_grpo", [[0, 1, 0.5], [4, 1, 0]]),
        ("gspo", [[1, 1, 1], [1, 1, 0]]),
        ("gspo_token", [[1, 1, 1], [1, 1, 0]]),
        ("luspo", [[1, 1, 1], [1, 1, 0]]),
        ("gmpo", [[0, 1, 1], [1, 1, 0]]),
        ("cispo", [[2, 1, 0.5], [4, 1, 0]]),
        ("rloo", [[1, 1, 1], [1, 1, 0]]),
        ("vespo", [[1, 1, 1], [phi(4, 3, 2), phi(4, 3, 2), 0]]),
        (
            "sapo",
            [
                [2 / math.cosh(0.5) ** 2, 1, 0.5 / math.cosh(0.25) ** 2],
                [4 / math.cosh(1.05 * 1.5) ** 2, 1, 0],
            ],
        ),
    ],
)
def test_token_weights(name, weights):
    options = {"tau_pos": 1.0, "tau_neg": 2.0} if name == "sspo" else {}
    got = build_objective({"name": name, **options}).token_weights(X + OLD, OLD, ADVANTAGES, MASK)
    torch.testing.assert_close(got, torch.tensor(weights, dtype=torch.float64), rtol=1e-12, atol=1e-15)


def test_an_advantage_of_zero_takes_the_temperature_of_negative_ones():
    objective = build_objective({"name": "sspo", "tau_pos": 1.0, "tau_neg": 3.0})
    x = torch.ones(1, 1, dtype=torch.float64)
    weight = objective.token_weights(x, torch.zeros_like(x), torch.zeros(1), torch.ones(1, 1))
    assert weight.item() == pytest.approx(1 / (1 + 9))


def test_metrics():
    metrics = build_objective({"name": "grpo"})(X + OLD, OLD, ADVANTAGES, MASK).metrics
    response_weights = (1.5 / 3, 5 / 2)
    expected = {
        "ratio/mean": 8.5 / 5,
        "ratio/max": 4.0,
        "log_ratio/std": math.sqrt((LOG2**2 + LOG2**2 + 4 * LOG2**2) / 5 - (2 * LOG2 / 5) ** 2),
        "gate_weight/mean": 6.5 / 5,
        "gate_weight/mean/positive": 1.5 / 3,
        "gate_weight/mean/negative": 5 / 2,
        "gate_weight/attenuated_fraction": 1 / 5,
        "gate_weight/attenuated_fraction/positive": 1 / 3,
        "gate_weight/attenuated_fraction/negative": 0.0,
        "sequence_weight/mean": 1.0,
        "sequence_weight/mean/positive": 1.0,
        "sequence_weight/mean/negative": 1.0,
        "sequence_weight/max": 1.0,
        "effective_sample_size": sum(response_weights) ** 2 / (2 * sum(w * w for w in response_weights)),
    }
    assert {name: value.item() for name, value in metrics.items()} == pytest.approx(expected)
    assert not any(value.requires_grad for value in metrics.values())


def test_metrics_of_sequence_weights():
    metrics = build_objective({"name": "gspo", "clip_low": 0.5})(X + OLD, OLD, ADVANTAGES, MASK).metrics
    assert metrics["sequence_weight/mean"].item() == pytest.approx(1.5)
    assert metrics["sequence_weight/mean/positive"].item() == pytest.approx(1.0)
    assert metrics["sequence_weight/mean/negative"].item() == pytest.approx(2.0)
    assert metrics["sequence_weight/max"].item() == pytest.approx(2.0)


def test_attenuation_of_a_soft_gate_counts_weights_under_one_half():
    """At tau = 2, w = 1 / (1 + 4 x^2) is 0.34 at x = log 2 and 0.12 at 2 log 2."""
    objective = build_objective({"name": "sspo", "tau_pos": 2.0, "tau_neg": 2.0})
    assert objective(X + OLD, OLD, ADVANTAGES, MASK).metrics["gate_weight/attenuated_fraction"].item() == 3 / 5


def test_weight_curve_of_each_sign():
    x = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    sspo = build_objective({"name": "sspo", "tau_pos": 1.0, "tau_neg": 3.0})
    assert sspo.weight_curve(x, +1).tolist() == pytest.approx([0.5, 1.0, 0.5])
    assert sspo.weight_curve(x, -1).tolist() == pytest.approx([0.1, 1.0, 0.1])
    grpo = build_objective({"name": "grpo"})
    assert grpo.weight_curve(x, +1).tolist() == pytest.approx([math.exp(-1), 1.0, 0.0])
    assert grpo.weight_curve(x, -1).tolist() == pytest.approx([0.0, 1.0, math.e])
