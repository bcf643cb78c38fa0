"""The report and the comparison: self-contained, escaped, right in their numbers, also for unfinished runs."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from nemo_sspo.errors import UserError
from nemo_sspo.report import html, load_run, write_comparison, write_report
from nemo_sspo.report.compare import by_configuration, labels, median, overlay
from nemo_sspo.report.text import flatten, number, points, seconds

TAGS = {"html", "head", "code", "meta", "link", "title", "style", "body", "main", "h1", "h2", "p", "div", "b", "span",
        "figure", "picture", "source", "img", "figcaption", "table", "thead", "tbody", "tr", "th", "td"}  # fmt: skip


class Page(HTMLParser):
    """What a browser would see: tags, what they load, the tables' cells."""

    def __init__(self, path):
        super().__init__()
        self.tags, self.loads, self.rows, self.text, self.stack = set(), [], [], "", []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        assert self.stack == [], "every tag is closed"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.loads += [value for key, value in attrs if key in ("src", "srcset", "href", "data", "action")]
        if tag not in ("meta", "link", "img", "source"):
            self.stack.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if "style" not in self.stack:
            self.text += data
        if self.stack and ("td" in self.stack or "th" in self.stack):
            self.rows[-1][-1] += data


@pytest.fixture
def no_drawing(monkeypatch):
    """One dot for every figure: drawing is most of the time, and the page is what these tests are about."""
    dot = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
    monkeypatch.setattr(
        html, "_image", lambda title, note, _: {"title": title, "note": note, "light": dot, "dark": dot}
    )
    monkeypatch.setattr(html, "png", lambda _: b"")


def test_report_is_self_contained_and_has_the_numbers(make_run):
    folder = make_run(rollouts=4)
    page = Page(write_report(folder))
    run = load_run(folder)
    assert page.tags <= TAGS
    assert len(page.loads) == 1 + 2 * 9  # the icon, and nine figures on light and on dark
    assert all(load.startswith("data:") for load in page.loads)
    assert not re.search(r"https?://|@import|url\(|<script", page.source)
    first, last = (record for record in run.validation if record["split"] == "test")
    assert f"{first['pass_at_1']:.3f}" in page.text
    assert f"+{last['pass_at_1'] - first['pass_at_1']:.3f}" in page.text
    with_think = [f"{last[key]:.3f}" for key in ("think_fraction", "pass_at_1_with_think", "pass_at_1_without_think")]
    assert ["after", *with_think, f"{last['pass_at_1']:.3f}"] in page.rows
    assert ["model.grpo.objective.gate", "atanlog"] in page.rows
    assert ["versions.torch", "2.9.0"] in page.rows
    assert sum(row[1:2] in (["validation"], ["test"]) for row in page.rows) == len(run.validation)
    plots = sorted(path.stem for path in (folder / "plots").iterdir())
    assert plots == sorted(["overview", "pass_at_1", "reward", "think", "ratio", "gate_weight", "entropy",
                            "response_length", "gradient", "cold_start"])  # fmt: skip


@pytest.mark.usefixtures("no_drawing")
def test_whatever_a_model_writes_is_text(make_run):
    evil = "<script>alert(1)</script><img src=http://example.com/x.png onerror=\"x\"> & 'quotes' {{ 7*7 }}"
    page = Page(write_report(make_run(rollouts=1, cold_start=0, response=evil)))
    assert page.tags <= TAGS
    assert all(load.startswith("data:") for load in page.loads)
    assert any(evil in row for row in page.rows)


@pytest.mark.usefixtures("no_drawing")
def test_samples_are_of_the_first_middle_and_last_rollout(make_run):
    page = Page(write_report(make_run(rollouts=7, cold_start=0)))
    assert [row[:2] for row in page.rows if len(row) == 5 and row[3] == "12"] == [
        ["1", "17+5="], ["4", "47+5="], ["7", "77+5="],
    ]  # fmt: skip


@pytest.mark.parametrize(
    "options", [{"rollouts": 0}, {"rollouts": 1, "finished": False}, {"rollouts": 0, "cold_start": 0}]
)
def test_an_unfinished_run_has_a_report(make_run, options):
    page = Page(write_report(make_run(**options)))
    assert "not finished" in page.text
    if options["rollouts"] == 0:
        assert "Lift" not in page.text
    if options == {"rollouts": 0}:
        assert "cold start, step 40 of 40" in page.text


@pytest.mark.usefixtures("no_drawing")
def test_a_run_killed_in_the_middle_of_a_line_has_a_report(make_run):
    folder = make_run(rollouts=2, finished=False)
    for name in ("metrics.jsonl", "validation.jsonl", "samples.jsonl"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-9])
    page = Page(write_report(folder))
    assert "greedy, validation split, 2 rollouts" in page.text  # the test split's line is the half one


@pytest.mark.usefixtures("no_drawing")
def test_report_twice_is_the_same_report(make_run):
    folder = make_run(rollouts=1)
    first = write_report(folder).read_bytes()
    assert write_report(folder).read_bytes() == first


def test_report_names_a_folder_that_is_no_run(tmp_path):
    with pytest.raises(UserError, match="not a run's folder"):
        write_report(tmp_path)


@pytest.mark.usefixtures("no_drawing")
def test_report_that_cannot_be_written_is_named(make_run):
    folder = make_run(rollouts=0)
    (folder / "plots").write_text("in the way")
    with pytest.raises(UserError, match=r"run: the report cannot be written"):
        write_report(folder)


@pytest.mark.usefixtures("no_drawing")
def test_comparison_shows_results_medians_and_differences(make_run, tmp_path):
    soft = [make_run(f"soft_{seed}", seed=seed, rollouts=3) for seed in (1, 2, 3)]
    hard = make_run("hard", seed=1, rollouts=3, objective={"name": "grpo"})
    page = Page(write_comparison([*soft, hard], tmp_path / "out" / "comparison.html"))
    assert page.tags <= TAGS
    assert all(load.startswith("data:") for load in page.loads)
    lifts = [load_run(folder).outcome.lift for folder in soft]
    rows = {row[0]: row for row in page.rows}
    assert rows["soft_2"][6] == points(lifts[1])
    assert rows["soft, median of 3 seeds"][6] == points(float(np.median(lifts)))
    assert "hard" in rows
    assert rows["model.seed"] == ["model.seed", "1", "2", "3", "1"]
    assert rows["model.grpo.objective.name"] == ["model.grpo.objective.name", "sspo", "sspo", "sspo", "grpo"]
    assert "model.num_layers" not in rows


def test_overlay_carries_each_run_and_the_median(make_run):
    runs = [load_run(make_run(f"s{seed}", seed=seed, rollouts=3)) for seed in (1, 2, 3)]
    runs.append(load_run(make_run("other", objective={"name": "grpo"}, rollouts=2)))
    figure = overlay(runs, "Reward", "metrics", "reward/mean", "Mean reward")
    drawn = [line.get_ydata() for line in figure.axes[0].get_lines()]
    single = [run.by_rollout("reward/mean")[1] for run in runs]
    for got, expected in zip(drawn, [*single[:3], np.median(single[:3], axis=0), single[3]], strict=True):
        np.testing.assert_allclose(got, expected)
    legend = figure.axes[0].get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["s, median of 3 seeds", "other"]


def test_runs_of_one_configuration_are_grouped_by_everything_but_seed_and_folder(make_run):
    options = {"a": {"seed": 1}, "b": {"objective": {"name": "grpo"}}, "c": {"seed": 2}}
    runs = [load_run(make_run(name, rollouts=0, **option)) for name, option in options.items()]
    assert by_configuration(runs) == [[0, 2], [1]]


def test_median_is_over_the_rollouts_that_all_have_reached():
    curves = [(np.array([0, 1, 2]), np.array([1.0, 2.0, 9.0])), (np.array([0, 1]), np.array([3.0, 6.0]))]
    x, y = median(curves)
    assert x.tolist() == [0, 1]
    assert y.tolist() == [2.0, 4.0]


def test_folders_of_one_name_are_told_apart(make_run):
    runs = [load_run(make_run(name, rollouts=0)) for name in ("x/run", "y/run")]
    assert labels(runs) == ["x/run", "y/run"]


@pytest.mark.usefixtures("no_drawing")
def test_comparison_of_runs_that_have_not_begun(make_run, tmp_path):
    page = Page(write_comparison([make_run("a", rollouts=0), make_run("b", rollouts=2)], tmp_path / "c.html"))
    assert [row[:5] for row in page.rows if row[0] == "a"] == [["a", "test", "1234", "0", "–"]]


@pytest.mark.usefixtures("no_drawing")
def test_comparison_that_cannot_be_written_is_named(make_run, tmp_path):
    with pytest.raises(UserError, match=r"^.*config\.yaml/c\.html: cannot be written"):
        write_comparison([make_run(rollouts=0)], tmp_path / "run" / "config.yaml" / "c.html")


def test_numbers_for_a_reader():
    assert [number(x) for x in (None, 0.5, 0.0, 3e-5, 123.456, 12345.6, 7, "a")] == [
        "–", "0.500", "0.000", "3e-05", "123.5", "12,345.6", "7", "a",
    ]  # fmt: skip
    assert [points(x) for x in (None, 0.25, -0.125)] == ["–", "+0.250", "−0.125"]
    assert [seconds(x) for x in (9.4, 245, 7300)] == ["9 s", "4 min 05 s", "2 h 01 min"]
    assert flatten({"a": {"b": 1, "c": None}, "command": ["x", "y"], "betas": [0.9]}) == [
        ("a.b", "1"), ("command", "x y"), ("betas", "[0.9]"),
    ]  # fmt: skip
