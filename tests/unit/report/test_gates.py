"""`nemo-sspo gates`: values of f, f'/f and w by hand, entries of the table, files."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from nemo_sspo.errors import UserError
from nemo_sspo.objective import GATES, build_objective, register_gate
from nemo_sspo.objective.sspo import PRESETS
from nemo_sspo.report import gates_figure as gates
from nemo_sspo.report.style import theme

SETS = {"given": (1.0, 2.0)}


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, float | None], gates.Row]:
    return {(row.entry.label, row.entry.tau): row for row in gates.table_rows(SETS, list(GATES))}


def test_temperature_sets_name_equal_pairs_together():
    assert list(gates.temperature_sets()) == ["default, paper_scale", "paper_literal"]
    assert gates.temperature_sets()["default, paper_scale"] == pytest.approx((1 / 0.3, 1 / 0.2))
    assert gates.temperature_sets(preset="paper_literal") == {"paper_literal": (0.2, 0.3)}
    assert gates.temperature_sets((2.0, 3.0)) == {"given": (2.0, 3.0)}
    with pytest.raises(UserError, match=r"--preset: unknown 'paper_litral'.* Did you mean 'paper_literal'\?"):
        gates.temperature_sets(preset="paper_litral")


LN2 = math.log(2)


@pytest.mark.parametrize(
    ("label", "tau", "at_2", "at_half"),
    [
        ("expsig", 1.0, 2 / math.cosh(0.5) ** 2, 0.5 / math.cosh(0.25) ** 2),
        ("expatan", 2.0, 2 / 5, 0.5 / 2),
        ("gumbel", None, 2 / math.e, 0.5 * math.exp(0.5)),
        ("siglog", 2.0, 16 / 25, 16 / 25),  # sech^2(ln 2) = (2 / (2 + 1/2))^2
        ("atanlog", 1.0, 1 / (1 + LN2**2), 1 / (1 + LN2**2)),
        ("GMPO clip, A > 0", None, 0.0, 1.0),
        ("GMPO clip, A < 0", None, 1.0, 0.0),
        ("GRPO clip, A > 0", None, 0.0, 0.5),
        ("GRPO clip, A < 0", None, 2.0, 0.0),
        ("SAPO", 1.0, 2 / math.cosh(0.5) ** 2, 0.5 / math.cosh(0.25) ** 2),
        ("f = rho", None, 1.0, 1.0),
    ],
)
def test_weights_by_hand(rows, label, tau, at_2, at_half):
    weights = dict(zip(gates.RATIOS, rows[label, tau].weights, strict=True))
    assert list(weights) == [0.5, 0.8, 1.25, 2.0, 2.5]
    assert (weights[2.0], weights[0.5]) == pytest.approx((at_2, at_half), rel=1e-12)


@pytest.mark.parametrize(
    ("label", "tau", "kind", "failing"),
    [
        ("expsig", 1.0, "iii.1", set()),
        ("expatan", 2.0, "iii.1", set()),
        ("gumbel", None, "iii.2", set()),
        ("siglog", 1.0, "iii.2", set()),
        ("atanlog", 2.0, "iii.2", set()),
        ("GMPO clip, A > 0", None, None, {"i", "iii"}),
        ("GMPO clip, A < 0", None, None, {"i", "iii"}),
        ("GRPO clip, A > 0", None, None, {"i", "iii"}),
        ("GRPO clip, A < 0", None, None, {"i", "iii"}),
        ("SAPO", 1.05, None, {"ii", "iii"}),
        ("f = rho", None, None, {"iii"}),
    ],
)
def test_conditions(rows, label, tau, kind, failing):
    assert (rows[label, tau].kind, set(rows[label, tau].failures)) == (kind, failing)


def test_a_failure_says_where(rows):
    assert rows["GRPO clip, A > 0", None].failures["i"] == "f' jumps at log rho = 0.182 (ratio 1.2)"
    assert rows["GMPO clip, A < 0", None].failures["i"] == "f' jumps at log rho = -0.4 (ratio 0.67)"
    assert rows["SAPO", 1.0].failures["ii"] == "log f(1) = 0.693, f'(1) = 1 at tau = 1"


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_are_those_of_the_objectives(sign):
    """What is drawn for GRPO, GMPO and SAPO is the weight that the objective of that name gives a token."""
    import torch

    ratio = np.exp(np.linspace(-2, 2, 42))
    for entry in gates.reference_entries(sign):
        objective = build_objective({"name": entry.label[:4].lower()})
        expected = objective.token_weights(
            torch.as_tensor(np.log(ratio))[:, None],
            torch.zeros(42, 1),
            torch.full((42,), float(sign)),
            torch.ones(42, 1),
        )
        np.testing.assert_allclose(
            entry.values(ratio)["weight"], expected[:, 0].numpy(), rtol=1e-6, err_msg=entry.label
        )


def test_f_and_slope_by_hand():
    (atanlog,) = gates.gate_entries(["atanlog"], 2.0)
    values = atanlog.values(np.array([1.0, 2.0]))
    assert values["f"] == pytest.approx([1, math.exp(math.atan(2 * LN2) / 2)])
    assert values["slope"] == pytest.approx([1, 0.5 / (1 + 4 * LN2**2)])
    sapo = gates.reference_entries(1)[-1].values(np.array([1.0]))
    assert (sapo["f"][0], sapo["slope"][0]) == pytest.approx((2, 0.5))
    clip = gates.reference_entries(1)[0].values(np.array([0.5, 1.1, 3.0]))
    assert clip["f"] == pytest.approx([0.5, 1.1, 1.2])
    assert clip["slope"] == pytest.approx([2, 1 / 1.1, 0])


def test_table_text(rows):
    text = gates.format_table([rows["atanlog", 1.0], rows["f = rho", None]], SETS)
    assert text.splitlines()[:6] == [
        "Temperatures:",
        "  given: 1 where A > 0, 2 elsewhere",
        "",
        "gate       tau   (i)  (ii)  (iii)  (iv)   w(0.5)  w(0.8) w(1.25)    w(2)  w(2.5)",
        "atanlog      1   yes  yes   iii.2  yes     0.675   0.953   0.953   0.675   0.544",
        "f = rho      -   yes  yes   no     yes     1.000   1.000   1.000   1.000   1.000",
    ]
    assert "  f = rho: (iii) w does not vanish as rho grows: w = 1 at log rho = 1e+04" in text
    assert "Where a condition fails" not in gates.format_table([rows["atanlog", 1.0]], SETS)


def test_files_are_the_same_every_time(tmp_path):
    first, second = (gates.write_gates(tmp_path / name, SETS, ["atanlog", "gumbel", "atanlog"]) for name in "ab")
    assert first[0] == second[0]
    assert first[1:] == [str(tmp_path / "a" / "gates.png"), str(tmp_path / "a" / "gates.svg")]
    for name in ("gates.png", "gates.svg"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert (tmp_path / "a" / "gates.png").read_bytes().startswith(b"\x89PNG")
    drawing = (tmp_path / "a" / "gates.svg").read_text()
    assert "</svg>" in drawing and "<dc:date>" not in drawing
    assert not any(line.endswith(" ") for line in drawing.splitlines())


def test_a_column_for_each_temperature_and_a_line_for_each_gate():
    with theme():
        figure = gates.gates_figure({"given": (1.0, 2.0), "more": (3.0, 4.0)}, ["siglog", "gumbel"])
    panels = figure.get_axes()
    assert len(panels) == 3 * 4
    titles = [axes.get_title(loc="left") for axes in panels[:4]]
    assert titles == ["given\nA > 0: τ = 1", "given\nA < 0: τ = 2", "more\nA > 0: τ = 3", "more\nA < 0: τ = 4"]
    labels = [line.get_label() for line in panels[0].get_lines()[:5]]
    assert labels == ["GRPO clip", "GMPO clip", "SAPO", "siglog", "gumbel"]
    ratio, weight = panels[8 + 1].get_lines()[3].get_data()
    assert weight == pytest.approx(4 * ratio**2 / (1 + ratio**2) ** 2)  # sech^2(log rho), tau = 2
    assert [text.get_text() for text in figure.legends[0].get_texts()] == labels


def test_a_gate_of_ones_own_is_drawn_and_checked(tmp_path):
    import torch

    before = dict(GATES)
    try:
        register_gate("mine", lambda x, tau: torch.tanh(tau * x) / tau, temperatures=(1.0,))
        GATES["bad"] = replace(GATES["siglog"], name="bad", log_f=lambda x, tau: 2 * torch.tanh(x))
        table = gates.write_gates(tmp_path, {"given": (1.0, 1.0)}, ["mine", "bad"])[0]
    finally:
        GATES.clear()
        GATES.update(before)
    assert [line.split()[:6] for line in table.splitlines() if line.startswith("mine")] == [
        ["mine", "1", "yes", "yes", "iii.2", "yes"]
    ]
    assert "  bad: (ii) log f(1) = 0, f'(1) = 2 at tau = 1" in table
    assert "  bad: (weight) the weight is not the derivative of log f, most at log rho = " in table


def test_unknown_gate_and_folder(tmp_path):
    with pytest.raises(UserError, match=r"--gate: unknown 'siglgo'.* Did you mean 'siglog'\?"):
        gates.write_gates(tmp_path / "a", SETS, ["siglgo"])
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--output: .*file.* cannot be written \((Not a directory|File exists)\)"):
        gates.write_gates(tmp_path / "file", SETS)
    assert not (tmp_path / "a").exists()


def test_help_names_the_presets(capsys):
    from nemo_sspo import cli

    with pytest.raises(SystemExit):
        cli.main(["gates", "--help"])
    assert " or ".join(PRESETS) in " ".join(capsys.readouterr().out.split())
