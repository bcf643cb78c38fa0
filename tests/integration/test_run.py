"""Whole runs: what they leave behind, that they repeat, that they resume, and what they refuse."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from tests.tiny_run import lines, start, train, without_times

RECORDS = ("cold_start.jsonl", "metrics.jsonl", "validation.jsonl", "samples.jsonl")


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run that went through without a break."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    train(run_dir)
    return run_dir


def test_the_runs_folder(finished):
    metrics = lines(finished / "metrics.jsonl")
    assert [(m["rollout"], m["step"]) for m in metrics] == [(1, 1), (1, 2), (2, 3), (2, 4), (3, 5), (3, 6)]
    for key in (
        "loss/mean grad_norm reward/mean ratio/mean ratio/max log_ratio/std gate_weight/mean entropy/mean "
        "response_length/mean lr time/rollout time/train think_fraction truncated_fraction rollout_logprob_gap/max"
    ).split():
        assert all(isinstance(m[key], int | float) for m in metrics), key
    assert len(lines(finished / "cold_start.jsonl")) == 20
    seen = [(v["rollout"], v["split"]) for v in lines(finished / "validation.jsonl")]
    assert sorted(seen) == [(0, "test"), (0, "validation"), (2, "validation"), (3, "test"), (3, "validation")]
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["optimizer_steps"] == 6
    assert summary["responses"] == 48
    assert {"cold_start_pass_at_1", "final_pass_at_1", "samples_per_second", "seconds"} <= summary.keys()
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["versions"]["megatron-core"]
    assert environment["layout"]["world_size"] == 1
    assert environment["layers"] == "Megatron-Core"
    assert (finished / "report.html").stat().st_size > 10_000
    assert list((finished / "plots").glob("*.png"))
    assert list(finished.glob("events.out.tfevents*"))
    assert sorted(p.name for p in (finished / "checkpoints").iterdir()) == ["step_000001", "step_000002", "step_000003"]


def test_the_first_optimizer_step_is_on_policy_and_the_second_is_not(finished):
    for first, second in zip(*[iter(lines(finished / "metrics.jsonl"))] * 2, strict=True):
        assert first["ratio/max"] == pytest.approx(1.0, abs=1e-5)
        assert first["log_ratio/std"] < 1e-6
        assert second["log_ratio/std"] > 1e-6
        assert sum(first["log_ratio/histogram"]) > 0
        assert first["rollout_logprob_gap/max"] < 0.1  # generation leaves out the padding token, here of some percent


def test_rewards_in_the_samples_are_those_of_their_texts(finished):
    from nemo_sspo.environment import answer_reward, format_reward

    samples = lines(finished / "samples.jsonl")
    assert samples
    for sample in samples:
        assert sample["answer"] == answer_reward(sample["response"], sample["gold"])
        assert sample["format"] == format_reward(sample["response"])
        assert sample["reward"] == pytest.approx(sample["answer"] + sample["format"])


def test_the_same_seed_gives_the_same_metrics(finished, tmp_path):
    train(tmp_path / "again")
    for name in RECORDS:
        assert without_times(lines(tmp_path / "again" / name)) == without_times(lines(finished / name)), name


@pytest.mark.slow
def test_another_seed_gives_others(finished, tmp_path):
    train(tmp_path / "other", "model.seed=7")
    one, other = (without_times(lines(folder / "metrics.jsonl")) for folder in (finished, tmp_path / "other"))
    assert one != other


@pytest.mark.parametrize(
    ("when", "number"),
    [("cold_start.jsonl", signal.SIGTERM), ("metrics.jsonl", signal.SIGINT)],
    ids=["cold_start", "grpo"],
)
def test_a_stopped_run_resumes_as_if_nothing_had_been(finished, tmp_path, when, number):
    run_dir = tmp_path / "stopped"
    process = start(run_dir)
    deadline = time.monotonic() + 120
    while not (run_dir / when).exists() or not (run_dir / when).stat().st_size:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    assert f"Stopped on {number.name}" in out
    assert "run the same command again" in out
    assert len(lines(run_dir / when)) < len(lines(finished / when))
    assert "resuming from" in train(run_dir).stdout
    for name in RECORDS:
        assert without_times(lines(run_dir / name)) == without_times(lines(finished / name)), name


@pytest.mark.slow
@pytest.mark.parametrize("when", ["cold_start.jsonl", "metrics.jsonl"])
def test_a_killed_run_resumes_from_its_newest_checkpoint(finished, tmp_path, when):
    run_dir = tmp_path / "killed"
    process = start(run_dir, "trainer.sft.save_interval=4")
    deadline = time.monotonic() + 120
    while not (run_dir / when).exists() or len((run_dir / when).read_text().splitlines()) < (
        7 if "cold" in when else 3
    ):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.kill()
    process.communicate(timeout=60)
    assert list((run_dir / "checkpoints").glob("*_0*"))
    train(run_dir, "trainer.sft.save_interval=4")
    for name in RECORDS:
        assert without_times(lines(run_dir / name)) == without_times(lines(finished / name)), name


def test_a_finished_run_run_again_changes_nothing(finished):
    before = {name: (finished / name).read_bytes() for name in RECORDS}
    train(finished)
    assert {name: (finished / name).read_bytes() for name in RECORDS} == before


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.hidden_size=64", "model.hidden_size was 32 and is 64"),
        ("model.grpo.objective.name=grpo", "model.grpo.objective.name was 'sspo' and is 'grpo'"),
        ("exp_manager.resume_if_exists=false", "exp_manager.resume_if_exists is false"),
    ],
)
def test_a_folder_with_another_run_is_refused(finished, override, message):
    before = (finished / "config.yaml").read_bytes()
    result = train(finished, override, status=2)
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert (finished / "config.yaml").read_bytes() == before


def test_worked_examples_that_do_not_fit_are_named(tmp_path):
    data = tmp_path / "data.jsonl"
    with open(data, "w") as out:
        for a in range(10, 30):
            work = "<think>" + "1" * 40 + f"</think><answer>{a + 1}</answer>"
            out.write(json.dumps({"question": f"{a}+1=", "answer": str(a + 1), "response": work}) + "\n")
    result = train(tmp_path / "run", f"model.data.data_prefix.train=[{data}]", status=2)
    assert "trainer.sft.max_steps" in result.stderr
    assert "are longer than" in result.stderr
    assert not (tmp_path / "run").exists()


def test_bad_data_is_refused_before_anything_is_written(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"question": "1+1=", "answer": "2"}\n{"question": \n')
    result = train(tmp_path / "run", f"model.data.data_prefix.train=[{data}]", status=2)
    assert "data.jsonl:2" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    result = train(tmp_path / "file" / "run", status=2)
    assert "exp_manager.explicit_log_dir" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["grpo", "gspo", "gmpo", "sapo"])
def test_the_other_objectives_train(tmp_path, objective):
    train(tmp_path / objective, f"model.grpo.objective.name={objective}", "model.grpo.objective.gate=null")
    assert len(lines(tmp_path / objective / "metrics.jsonl")) == 6


@pytest.mark.slow
def test_corrections_and_the_entropy_bonus_train(tmp_path):
    options = (
        "rollout_correction=token_tis",
        "rollout_sequence_mask=max",
        "rollout_sequence_high=2.0",
        "entropy_coeff=0.01",
    )
    train(tmp_path / "run", *(f"model.grpo.objective.{option}" for option in options))
    records = lines(tmp_path / "run" / "metrics.jsonl")
    assert all(0.9 < r["rollout_ratio/mean"] < 1.1 for r in records)  # the engine shares the trainer's weights
    assert any(r["log_ratio/std"] > 1e-6 for r in records)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["expsig", "expatan", "gumbel", "siglog"])
def test_the_other_gates_train(tmp_path, gate):
    train(tmp_path / gate, f"model.grpo.objective.gate={gate}", "trainer.grpo.max_steps=1")
    assert len(lines(tmp_path / gate / "metrics.jsonl")) == 2
