"""Reading a run's folder back, and the bins over the log-ratio."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from nemo_sspo.errors import UserError
from nemo_sspo.report import LOG_RATIO_BINS, load_run, log_ratio_histogram


def test_the_bins_are_even_and_centred_on_zero():
    assert len(LOG_RATIO_BINS) == 202
    assert LOG_RATIO_BINS[0] == -2.01
    assert LOG_RATIO_BINS[-1] == 2.01
    assert LOG_RATIO_BINS[100:102] == (-0.01, 0.01)
    np.testing.assert_allclose(np.diff(LOG_RATIO_BINS), 0.02, atol=1e-12)


def test_histogram_by_hand():
    values = torch.tensor([[0.0, 1e-8, -1e-8, 0.0], [0.02, -2.0, 2.0, math.nan], [-5.0, -math.inf, math.inf, 2.5]])
    counts = log_ratio_histogram(values)
    assert len(counts) == 203
    got = {index: count for index, count in enumerate(counts) if count}
    assert got == {0: 2, 1: 1, 101: 4, 102: 1, 201: 1, 202: 2}  # index k is [edge k-1, edge k)


def test_histogram_edges_belong_to_the_bin_above():
    edges = torch.tensor([-2.01, 0.01, 2.01], dtype=torch.float64)
    assert [index for index, count in enumerate(log_ratio_histogram(edges)) if count] == [1, 102, 202]


def test_histogram_takes_gradients_half_precision_and_nothing():
    assert sum(log_ratio_histogram(torch.zeros(3, dtype=torch.bfloat16, requires_grad=True))) == 3
    assert log_ratio_histogram(torch.zeros(0)) == [0] * 203


def test_load_run_reads_what_the_recorder_wrote(make_run):
    run = load_run(make_run(rollouts=3, cold_start=5))
    assert run.name == "run"
    assert run.option("model.seed") == 1234
    assert run.option("model.no.such") is None
    assert run.environment["versions"] == {"torch": "2.9.0"}
    assert run.summary["seconds"] == 245.0
    assert run.column("cold_start", "step").tolist() == [1, 2, 3, 4, 5]
    assert [record["rollout"] for record in run.metrics] == [1] * 4 + [2] * 4 + [3] * 4


def append(folder, name, *records):
    with open(folder / name, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def empty_run(tmp_path, config="model: {seed: 1}"):
    (tmp_path / "config.yaml").write_text(config)
    return tmp_path


def test_by_rollout_takes_the_last_step_or_combines(tmp_path):
    folder = empty_run(tmp_path)
    values = [(1, 2.0), (1, 1.0), (2, None), (2, 3.0), (3, 5.0), (3, None)]
    append(folder, "metrics.jsonl", *({"step": i, "rollout": r, "x": x} for i, (r, x) in enumerate(values, 1)))
    run = load_run(folder)
    rollouts, last = run.by_rollout("x")
    assert rollouts.tolist() == [1, 2, 3]
    np.testing.assert_array_equal(last, [1.0, 3.0, np.nan])
    np.testing.assert_array_equal(run.by_rollout("x", np.fmax)[1], [2.0, 3.0, 5.0])


def validation(rollout, split, value):
    return {"rollout": rollout, "split": split, "pass_at_1": value}


@pytest.mark.parametrize(
    ("records", "split", "lift"),
    [
        ([], "test", None),
        ([(0, "test", 0.4), (0, "validation", 0.5)], "test", None),
        # killed before the test split was measured a second time
        ([(0, "test", 0.4), (0, "validation", 0.5), (5, "validation", 0.75)], "validation", 0.25),
        ([(0, "test", 0.5), (0, "validation", 0.5), (5, "validation", 0.6), (5, "test", 0.25)], "test", -0.25),
    ],
)
def test_outcome_prefers_a_complete_test_split(tmp_path, records, split, lift):
    folder = empty_run(tmp_path)
    append(folder, "validation.jsonl", *(validation(*record) for record in records))
    outcome = load_run(folder).outcome
    assert outcome.split == split
    assert outcome.lift == (None if lift is None else pytest.approx(lift))


def test_a_run_that_is_being_written_is_read_up_to_its_last_whole_line(tmp_path):
    folder = empty_run(tmp_path)
    (folder / "metrics.jsonl").write_text('{"step": 1, "rollout": 1}\n{"step": 2, "ro')
    assert [record["step"] for record in load_run(folder).metrics] == [1]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"step": 1, "rollout": 1}\nnonsense\n', r"metrics\.jsonl:2: not JSON"),
        ("metrics.jsonl", "[1, 2]\n", r"metrics\.jsonl:1: got '\[1, 2\]', expected a JSON object"),
        ("metrics.jsonl", '{"step": 1}\n', r"metrics\.jsonl: record 1 lacks 'rollout'"),
        ("validation.jsonl", '{"rollout": 1, "split": "test"}\n', r"record 1 lacks 'pass_at_1'"),
        ("config.yaml", "model: [1", r"config\.yaml: cannot be read"),
        ("config.yaml", "- 1", r"config\.yaml: got list, expected keys"),
        ("summary.json", '{"seconds": ', r"summary\.json: cannot be read"),
    ],
)
def test_a_broken_file_is_named_in_one_line(tmp_path, name, content, message):
    folder = empty_run(tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(UserError, match=message) as caught:
        load_run(folder)
    assert "\n" not in str(caught.value)


def test_text_where_a_number_belongs_is_named(tmp_path):
    append(empty_run(tmp_path), "metrics.jsonl", {"step": 1, "rollout": 1, "grad_norm": "high"})
    with pytest.raises(UserError, match=r"metrics\.jsonl: 'grad_norm' must be a number or null"):
        load_run(tmp_path).column("metrics", "grad_norm")


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(UserError, match="absent: no such folder"):
        load_run(tmp_path / "absent")
    with pytest.raises(UserError, match=r"not a run's folder, config\.yaml is missing"):
        load_run(tmp_path)
