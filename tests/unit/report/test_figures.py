"""Figures show the numbers that the run recorded: read back from the axes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nemo_sspo.objective import OBJECTIVES
from nemo_sspo.report import LOG_RATIO_BINS, load_run
from nemo_sspo.report.figures import PLOTS, available, figure, overview, smooth
from nemo_sspo.report.gate import total_histogram, weight_curves
from nemo_sspo.report.style import png, theme


@pytest.fixture
def run(make_run):
    return load_run(make_run(moe_layers=3))


def lines(run, name, axes=0):
    """{label: (x, y)} of a figure's lines."""
    return {str(line.get_label()): line.get_data() for line in figure(run, name).axes[axes].get_lines()}


def assert_line(line, x, y):
    np.testing.assert_allclose(line[0], x)
    np.testing.assert_allclose(line[1], y)


def test_every_figure_is_available_titled_and_labelled(run):
    assert available(run) == list(PLOTS)
    for name in PLOTS:
        axes = figure(run, name).axes
        assert axes[0].get_title(loc="left") == PLOTS[name].title or axes[0].get_title() == PLOTS[name].title
        assert axes[0].get_xlabel()
        assert all(each.get_ylabel() for each in axes)


def test_pass_at_1_has_the_validation_curve_and_the_test_points(run):
    got = lines(run, "pass_at_1")
    assert set(got) == {"greedy, validation", "greedy, test", "sampled, validation", "sampled, test"}
    for label, key, split in (
        ("greedy, validation", "pass_at_1", "validation"),
        ("sampled, test", "sampled_accuracy", "test"),
    ):
        records = [record for record in run.validation if record["split"] == split]
        assert_line(got[label], [record["rollout"] for record in records], [record[key] for record in records])
    assert got["greedy, test"][0].tolist() == [0, 12]


def test_reward_is_drawn_by_rollout(run):
    axes = figure(run, "reward").axes[0]
    raw, smoothed = axes.get_lines()[:2]
    assert_line(raw.get_data(), range(1, 13), [record["reward/mean"] for record in run.metrics[3::4]])
    assert smoothed.get_label() == "total"


@pytest.mark.parametrize(
    ("name", "label", "table", "key"),
    [
        ("entropy", None, "metrics", "entropy/mean"),
        ("gradient", "_child0", "metrics", "grad_norm"),
        ("cold_start", None, "cold_start", "loss/mean"),
    ],
)
def test_lines_over_optimizer_steps(run, name, label, table, key):
    got = lines(run, name)
    line = got[label] if label else next(iter(got.values()))
    assert_line(
        line, [record["step"] for record in getattr(run, table)], [record[key] for record in getattr(run, table)]
    )


def test_learning_rate_is_on_the_right_axis(run):
    (line,) = lines(run, "gradient", axes=1).values()
    np.testing.assert_allclose(line[1], [record["lr"] for record in run.metrics])


def test_response_length_and_think(run):
    got = lines(run, "response_length")
    assert_line(got["longest"], range(1, 13), [record["response_length/max"] for record in run.metrics[3::4]])
    got = lines(run, "think")
    records = [record for record in run.validation if record["split"] == "validation"]
    x = [record["rollout"] for record in records]
    assert_line(got["uses the think block"], x, [record["think_fraction"] for record in records])
    assert_line(got["pass@1 without it"], x, [record["pass_at_1_without_think"] for record in records])


def test_ratio_bands_are_those_of_the_last_step_on_each_rollout(run):
    last = run.metrics[3::4]
    axes = figure(run, "ratio").axes[0]
    got = {str(line.get_label()): line.get_data() for line in axes.get_lines()}
    steps = [record["step"] for record in last]
    assert_line(got["median"], steps, np.exp([record["log_ratio/quantiles"][2] for record in last]))
    maxima = [max(record["ratio/max"] for record in run.metrics[4 * i : 4 * i + 4]) for i in range(12)]
    assert_line(got["largest"], steps, maxima)
    outer = axes.collections[0].get_paths()[0].vertices
    assert outer[:, 1].min() == pytest.approx(np.exp(min(record["log_ratio/quantiles"][0] for record in last)))
    assert outer[:, 1].max() == pytest.approx(np.exp(max(record["log_ratio/quantiles"][4] for record in last)))


def test_gate_figure_has_the_run_behind_it_and_the_weights_before_it(run):
    counts = np.sum([record["log_ratio/histogram"] for record in run.metrics], axis=0)
    assert total_histogram(run).tolist() == counts.tolist()
    assert counts.sum() == 12 * 4 * 4000
    front, behind = figure(run, "gate_weight").axes
    values, edges, _ = behind.patches[0].get_data()
    np.testing.assert_allclose(values, counts[1:-1] / counts.sum())
    np.testing.assert_allclose(edges, LOG_RATIO_BINS)
    positive, negative = front.get_lines()
    x = positive.get_xdata()
    np.testing.assert_allclose(positive.get_ydata(), 1 / (1 + (10 / 3 * x) ** 2), rtol=1e-6)
    np.testing.assert_allclose(negative.get_ydata(), 1 / (1 + (5.0 * x) ** 2), rtol=1e-6)


def test_tokens_beyond_the_bins_are_told(make_run):
    folder = make_run(rollouts=1)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    histogram = [0] * 203
    histogram[101], histogram[0], histogram[202] = 96, 1, 3
    records = [{**records[0], "log_ratio/histogram": histogram}, {**records[1], "log_ratio/histogram": None}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (text,) = figure(load_run(folder), "gate_weight").axes[0].texts
    assert text.get_text() == "4 % of tokens lie\nbeyond ±2"


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_every_objective_has_a_weight_figure(make_run, name):
    run = load_run(make_run(rollouts=1, cold_start=0, objective={"name": name, "gate": None, "advantages": "grpo"}))
    curves = weight_curves(run, np.linspace(-1, 1, 5))
    assert set(curves) == {"A > 0", "A < 0"}
    assert all(np.isfinite(curve).all() and curve.shape == (5,) for curve in curves.values())


def test_smooth_by_hand_with_gaps():
    values = np.array([1.0, np.nan, 3.0, 5.0, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(smooth(values, 3), [1.0, 2.0, 4.0, 4.0, 5.0, np.nan, np.nan])
    np.testing.assert_array_equal(smooth(values[2:4], 0), [3.0, 5.0])
    assert smooth(np.array([]), 5).shape == (0,)


def test_null_values_leave_gaps(make_run):
    folder = make_run(rollouts=2)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    records[2].update({"entropy/mean": None, "grad_norm": None, "ratio/max": None})
    records[3].update({"log_ratio/quantiles": [None] * 5, "ratio/max": None})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    run = load_run(folder)
    (line,) = lines(run, "entropy").values()
    assert np.flatnonzero(np.isnan(line[1])).tolist() == [2]
    for name in available(run):
        png(figure(run, name), dots_per_inch=30)


def test_only_what_was_recorded_is_available(make_run):
    before_grpo = load_run(make_run("cold", rollouts=0))
    assert available(before_grpo) == ["cold_start"]
    assert overview(before_grpo).axes == []
    assert "cold_start" not in available(load_run(make_run("no_cold", cold_start=0, rollouts=1)))


def test_drawing_is_repeatable_and_leaves_matplotlib_alone(run):
    import matplotlib

    before = dict(matplotlib.rcParams)
    with theme("dark"):
        dark = [png(figure(run, "entropy"), 40) for _ in range(2)]
    with theme("light"):
        light = png(figure(run, "entropy"), 40)
    assert dark[0] == dark[1] != light
    assert dark[0].startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before
