"""Figures of routing replay show the mismatch that the run recorded: read back from the axes."""

from __future__ import annotations

import json

import numpy as np
import pytest

from nemo_sspo.report import load_run
from nemo_sspo.report.compare import compare
from nemo_sspo.report.figures import available, figure
from nemo_sspo.report.style import png

FIGURES = ["routing_mismatch", "routing_layers"]
RATE, LAYERS, IMBALANCE = "routing/mismatch_rate", "routing/mismatch_by_layer", "routing/load_imbalance"


@pytest.fixture
def folder(make_run):
    """Five rollouts of four optimizer steps: steps 4, 8, 12, 16 and 20 are the last ones."""
    return make_run(rollouts=5, cold_start=0, moe_layers=3)


@pytest.fixture
def edit(folder):
    """``edit(change)`` puts ``change(records)`` in the place of the run's metrics and loads it."""

    def rewrite(change):
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in change(records)))
        return load_run(folder)

    return rewrite


def line(axes, label):
    (found,) = (line for line in axes.get_lines() if line.get_label() == label)
    return found.get_data()


def band(axes):
    """x, lowest and highest y of what is filled."""
    vertices = np.concatenate([path.vertices for path in axes.collections[0].get_paths()])
    steps = np.unique(vertices[:, 0])
    ys = [vertices[vertices[:, 0] == step, 1] for step in steps]
    return steps, [y.min() for y in ys], [y.max() for y in ys]


def heat_map(run):
    """Edges of the columns, edges of the rows, colours [L, columns] with NaN where there is none."""
    (mesh,) = figure(run, "routing_layers").axes[0].collections
    corners = mesh.get_coordinates()
    return corners[0, :, 0], corners[:, 0, 1], np.ma.filled(mesh.get_array(), np.nan)


def test_the_line_is_the_mean_and_the_band_the_range_of_layers_at_the_last_step_on_each_rollout(folder):
    run = load_run(folder)
    last = run.metrics[3::4]
    axes, right = figure(run, "routing_mismatch").axes
    steps, rates = line(axes, "mean of layers")
    assert steps.tolist() == [4, 8, 12, 16, 20]
    np.testing.assert_allclose(rates, [record[RATE] for record in last])
    assert rates[0] == pytest.approx(0.3 * (4 + 9 + 1) / 9 / 3)
    steps, low, high = band(axes)
    assert steps.tolist() == [4, 8, 12, 16, 20]
    np.testing.assert_allclose(low, [min(record[LAYERS]) for record in last])
    np.testing.assert_allclose(high, [max(record[LAYERS]) for record in last])
    assert (low[0], high[0]) == pytest.approx((0.3 / 9, 0.3))
    (imbalance,) = right.get_lines()
    assert imbalance.get_xdata().tolist() == [4, 8, 12, 16, 20]
    np.testing.assert_allclose(imbalance.get_ydata(), [1.6, 1.7, 1.8, 1.9, 2.0])
    assert right.get_ylabel() == "Busiest expert over mean load"


def test_lines_end_below_the_legend(folder):
    axes, right = figure(load_run(folder), "routing_mismatch").axes
    assert axes.get_ylim() == pytest.approx((0, 1.35 * 0.3))
    assert right.get_ylim() == pytest.approx((1, 1 + 1.35 * 1.0))
    assert axes.get_xlim()[0] == 0.5


@pytest.mark.parametrize("num_layers", [3, 48])
def test_the_heat_map_has_the_layers_in_order_and_a_column_as_wide_as_each_rollout(make_run, num_layers):
    run = load_run(make_run(rollouts=5, cold_start=0, moe_layers=num_layers))
    step_edges, layer_edges, colours = heat_map(run)
    assert step_edges.tolist() == [0.5, 4.5, 8.5, 12.5, 16.5, 20.5]
    assert layer_edges.tolist() == [layer + 0.5 for layer in range(num_layers + 1)]
    np.testing.assert_allclose(colours, np.transpose([record[LAYERS] for record in run.metrics[3::4]]))
    if num_layers == 3:
        np.testing.assert_allclose(colours[:, 0], [0.3 * 4 / 9, 0.3, 0.3 / 9])  # rollout 1: layer 2 has most


@pytest.mark.parametrize(("num_layers", "numbers"), [(1, [1]), (3, [1, 2, 3]), (48, [6, 12, 18, 24, 30, 36, 42, 48])])
def test_rows_have_layer_numbers(make_run, num_layers, numbers):
    axes = figure(load_run(make_run(rollouts=2, cold_start=0, moe_layers=num_layers)), "routing_layers").axes[0]
    low, high = axes.get_ylim()
    assert (low, high) == (0.5, num_layers + 0.5)
    assert [tick for tick in axes.get_yticks() if low < tick < high] == numbers


def test_the_colour_bar_is_that_of_the_heat_map_and_in_percent(folder):
    drawn = figure(load_run(folder), "routing_layers")
    axes, bar = drawn.axes
    assert axes.collections[0].get_clim() == pytest.approx((0, 0.3))
    assert bar.get_ylim() == pytest.approx((0, 0.3))
    assert bar.get_ylabel() == "Share of replayed experts"
    png(drawn, dots_per_inch=30)
    assert "10 %" in [text.get_text() for text in bar.get_yticklabels()]


def test_null_values_leave_gaps_where_they_are(edit):
    def nulls(records):
        records[3] |= {RATE: None, LAYERS: None}
        records[7] |= {LAYERS: [0.5, None, 0.25], IMBALANCE: None}
        records[11] |= {LAYERS: [None, None, None]}
        del records[15][LAYERS]
        return records

    run = edit(nulls)
    axes, right = figure(run, "routing_mismatch").axes
    assert np.isnan(line(axes, "mean of layers")[1]).tolist() == [True, False, False, False, False]
    steps, low, high = band(axes)
    assert (steps.tolist(), low[0], high[0]) == ([8, 20], 0.25, 0.5)
    assert np.isnan(right.get_lines()[0].get_ydata()).tolist() == [False, True, False, False, False]
    _, _, colours = heat_map(run)
    assert np.isnan(colours).T.tolist() == [[True] * 3, [False, True, False], [True] * 3, [True] * 3, [False] * 3]
    for name in FIGURES:
        png(figure(run, name), dots_per_inch=30)


def test_a_rollout_in_progress_is_left_out(edit):
    run = edit(lambda records: records[:10])  # two of the third rollout's four steps
    axes = figure(run, "routing_mismatch").axes[0]
    assert line(axes, "mean of layers")[0].tolist() == [4, 8]
    assert heat_map(run)[0].tolist() == [0.5, 4.5, 8.5]


@pytest.mark.parametrize("steps", [4, 2])
def test_a_single_rollout_is_seen_even_while_it_is_in_progress(edit, steps):
    run = edit(lambda records: records[:steps])
    rates = run.metrics[-1][LAYERS]
    drawn = figure(run, "routing_mismatch")
    axes, right = drawn.axes
    assert band(axes) == ([steps], [min(rates)], [max(rates)])
    assert axes.collections[0].get_linewidth() == [6]
    points = [line for line in (*axes.get_lines(), *right.get_lines()) if len(line.get_xdata())]
    assert [(line.get_xdata().tolist(), line.get_marker()) for line in points] == [([steps], "o")] * 2
    step_edges, _, colours = heat_map(run)
    assert step_edges.tolist() == [0.5, steps + 0.5]
    assert colours[:, 0].tolist() == rates
    for name in FIGURES:
        png(figure(run, name), dots_per_inch=30)


def test_points_of_many_rollouts_are_not_marked(make_run):
    run = load_run(make_run(rollouts=31, cold_start=0, steps_per_rollout=1, moe_layers=2))
    lines = figure(run, "routing_mismatch").axes[0].get_lines()
    assert {line.get_marker() for line in lines} == {""}


def test_no_mismatch_at_all_has_a_scale_and_the_colour_of_zero(make_run):
    run = load_run(make_run(rollouts=2, cold_start=0, steps_per_rollout=1, moe_layers=2))
    assert figure(run, "routing_mismatch").axes[0].get_ylim() == pytest.approx((0, 0.0135))
    assert heat_map(run)[2].tolist() == [[0, 0], [0, 0]]
    assert figure(run, "routing_layers").axes[0].collections[0].get_clim() == (0, 0.01)


def test_only_what_was_recorded_is_drawn(make_run, edit):
    assert not set(FIGURES) & set(available(load_run(make_run("no_replay", rollouts=1))))
    assert set(FIGURES) <= set(available(edit(lambda records: records)))
    run = edit(lambda records: [record | {IMBALANCE: None} for record in records])
    assert len(figure(run, "routing_mismatch").axes) == 1
    run = edit(lambda records: [record | {LAYERS: None} for record in records])
    assert set(FIGURES) & set(available(run)) == {"routing_mismatch"}
    axes = figure(run, "routing_mismatch").axes[0]
    assert not axes.collections
    np.testing.assert_allclose(line(axes, "mean of layers")[1], [record[RATE] for record in run.metrics[3::4]])
    assert not set(FIGURES) & set(available(edit(lambda records: [record | {RATE: None} for record in records])))


def test_the_comparison_has_the_mismatch_of_the_runs_that_replay(make_run, folder):
    runs = [load_run(folder), load_run(make_run("no_replay", rollouts=5, cold_start=0, objective={"name": "grpo"}))]
    axes = dict(compare(runs)["drawings"])["Routing mismatch"]().axes[0]
    (curve,) = axes.get_lines()
    assert curve.get_label() == "run"
    assert curve.get_xdata().tolist() == [1, 2, 3, 4, 5]
    np.testing.assert_allclose(curve.get_ydata(), [record[RATE] for record in runs[0].metrics[3::4]])
    assert "Routing mismatch" not in dict(compare(runs[1:])["drawings"])
