"""The run's files: line by line, truncated on resume, TensorBoard in step."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from nemo_sspo.errors import UserError
from nemo_sspo.report.jsonl import plain, write_json
from nemo_sspo.training.recorder import RunRecorder

FILES = ("cold_start.jsonl", "metrics.jsonl", "validation.jsonl", "samples.jsonl")


def record_run(recorder, rollouts, cold_start=(1, 2, 3), first_validation=True):
    """Cold start steps, validation 0, then rollouts with two optimizer steps each and a validation after every one."""
    for step in cold_start:
        recorder.cold_start({"step": step, "loss/mean": 1 / step})
    if first_validation:
        recorder.validation({"rollout": 0, "step": 0, "split": "test", "pass_at_1": 0.4})
    for rollout in rollouts:
        recorder.samples([{"rollout": rollout, "prompt": "1+1=", "response": f"é{rollout}"}])
        for step in (2 * rollout - 1, 2 * rollout):
            recorder.metrics({"step": step, "rollout": rollout, "reward/mean": rollout / 10, "loss/mean": step / 100})
        recorder.validation({"rollout": rollout, "step": 2 * rollout, "split": "test", "pass_at_1": 0.4 + rollout / 10})


def contents(folder):
    return {name: (folder / name).read_bytes() for name in FILES if (folder / name).exists()}


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text(encoding="utf-8").splitlines()]


def test_each_record_is_on_disk_as_one_line_at_once(tmp_path):
    recorder = RunRecorder(tmp_path / "a" / "b", tensorboard=False)
    recorder.metrics({"step": 1, "rollout": 1, "reward/mean": 0.5, "something/else": 7})
    assert (tmp_path / "a/b/metrics.jsonl").read_text() == (
        '{"step": 1, "rollout": 1, "reward/mean": 0.5, "something/else": 7}\n'
    )


def test_values_become_plain_json():
    got = plain({
        "tensor": torch.tensor(0.5), "array": np.arange(2), "scalar": np.float32(0.25), "flag": np.bool_(True),
        "nan": math.nan, "inf": torch.tensor([1.0, -math.inf]), "pair": (1, None), "dtype": torch.float32,
    })  # fmt: skip
    assert got == {
        "tensor": 0.5, "array": [0, 1], "scalar": 0.25, "flag": True,
        "nan": None, "inf": [1.0, None], "pair": [1, None], "dtype": "torch.float32",
    }  # fmt: skip
    json.dumps(got, allow_nan=False)


def test_nan_is_null_in_the_file(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        recorder.metrics({"step": 1, "rollout": 1, "ratio/max": torch.tensor(math.nan), "grad_norm": math.inf})
    assert lines(tmp_path, "metrics.jsonl") == [{"step": 1, "rollout": 1, "ratio/max": None, "grad_norm": None}]
    assert "ratio/max" not in scalars(tmp_path)


@pytest.mark.parametrize("kept", [1, 2, 3])
def test_a_resumed_run_has_the_files_of_an_uninterrupted_one(tmp_path, kept):
    with RunRecorder(tmp_path / "whole", tensorboard=False) as recorder:
        record_run(recorder, rollouts=(1, 2, 3, 4))
    with RunRecorder(tmp_path / "stopped", tensorboard=False) as recorder:
        record_run(recorder, rollouts=(1, 2, 3))
    with RunRecorder(tmp_path / "stopped", tensorboard=False) as recorder:
        recorder.resume(rollout=kept, step=2 * kept, cold_start_step=3)
        assert [record["step"] for record in lines(tmp_path / "stopped", "metrics.jsonl")] == list(
            range(1, 2 * kept + 1)
        )
        record_run(recorder, rollouts=range(kept + 1, 5), cold_start=(), first_validation=False)
    assert contents(tmp_path / "stopped") == contents(tmp_path / "whole")


def test_resume_within_the_cold_start_drops_all_that_follows_it(tmp_path):
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        record_run(recorder, rollouts=(1,))
        recorder.summary({"seconds": 1})
        before = contents(tmp_path)
        recorder.resume(rollout=0, step=0, cold_start_step=2)
        assert [record["step"] for record in lines(tmp_path, "cold_start.jsonl")] == [1, 2]
        assert not any(lines(tmp_path, name) for name in FILES[1:])
        assert not (tmp_path / "summary.json").exists()
        record_run(recorder, rollouts=(1,), cold_start=(3,))
    assert contents(tmp_path) == before


def test_resume_after_the_cold_start_keeps_its_validation_and_takes_no_second_one(tmp_path):
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        record_run(recorder, rollouts=())
        before = contents(tmp_path)
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        recorder.resume(rollout=0, step=0, cold_start_step=3)
        record_run(recorder, rollouts=(), cold_start=())
    assert contents(tmp_path) == before


def test_resume_at_the_very_beginning_starts_over(tmp_path):
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        record_run(recorder, rollouts=(1,))
        recorder.resume(0, 0, 0)
    assert all(content == b"" for content in contents(tmp_path).values())


def test_resume_where_nothing_is_dropped_keeps_the_summary(tmp_path):
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        record_run(recorder, rollouts=(1,))
        recorder.summary({"seconds": 1})
        recorder.resume(rollout=1, step=2, cold_start_step=3)
    assert json.loads((tmp_path / "summary.json").read_text()) == {"seconds": 1}


@pytest.mark.parametrize(
    "half", [b'{"step": 5, "rol', b'{"step": 5, "rollout": 3}', b'{"step": 5, "text": "\xc3', b"\0\0\0"]
)
@pytest.mark.parametrize("resume", [True, False])
def test_a_half_written_last_line_is_dropped(tmp_path, half, resume):
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        record_run(recorder, rollouts=(1, 2))
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(half)
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        if resume:
            recorder.resume(rollout=2, step=4, cold_start_step=3)
        recorder.metrics({"step": 5, "rollout": 3})
    assert [record["step"] for record in lines(tmp_path, "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rollout": 1}\n{"step": 2,\n{"step": 3, "rollout": 1}\n')
    with pytest.raises(UserError, match=r"metrics\.jsonl:2: not JSON .*delete"):
        RunRecorder(tmp_path, tensorboard=False).resume(1, 3, 0)


def scalars(folder):
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0}).Reload()
    return {tag: [(e.step, round(e.value, 6)) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_goes_in_step_and_a_resumed_run_purges(tmp_path):
    with RunRecorder(tmp_path) as recorder:
        record_run(recorder, rollouts=(1, 2, 3))
    with RunRecorder(tmp_path) as recorder:
        recorder.resume(rollout=1, step=2, cold_start_step=3)
        assert "reward/mean" in scalars(tmp_path)
        recorder.metrics({"step": 3, "rollout": 2, "reward/mean": 0.9})
    assert scalars(tmp_path)["reward/mean"] == [(1, 0.1), (2, 0.1), (3, 0.9)]
    assert scalars(tmp_path)["test/pass_at_1"] == [(0, 0.4), (2, 0.5)]
    assert scalars(tmp_path / "cold_start")["loss/mean"] == [(1, 1.0), (2, 0.5), (3, 0.333333)]
    assert "step" not in scalars(tmp_path)


def test_no_tensorboard_files_unless_asked_for(tmp_path):
    with RunRecorder(tmp_path, tensorboard=False) as recorder:
        record_run(recorder, rollouts=(1,))
    assert not list(tmp_path.rglob("events.out.tfevents*"))


def test_start_writes_config_and_environment(tmp_path):
    RunRecorder(tmp_path, tensorboard=False).start("model:\n  seed: 1\n", {"versions": {"torch": "2.9"}})
    assert (tmp_path / "config.yaml").read_text() == "model:\n  seed: 1\n"
    assert json.loads((tmp_path / "environment.json").read_text()) == {"versions": {"torch": "2.9"}}


def test_write_json_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    path = write_json(tmp_path / "summary.json", {"seconds": 1.5, "loss": math.nan})
    assert path.read_text() == '{\n  "seconds": 1.5,\n  "loss": null\n}\n'

    def full_disk(_):
        raise OSError("No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space"):
        write_json(path, {"seconds": 2.5})
    assert json.loads(path.read_text())["seconds"] == 1.5
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"]


def test_a_folder_that_cannot_be_made_is_the_users_to_mend(tmp_path):
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(UserError, match=r"^exp_manager\.explicit_log_dir: cannot write to .*taken/run") as caught:
        RunRecorder(tmp_path / "taken" / "run")
    assert "\n" not in str(caught.value)
