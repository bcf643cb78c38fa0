"""Runs that are killed, stopped, or meet what they can't compute or write: nothing is lost or goes on for ever."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.tiny_run import command, lines, start, train, without_times

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

RECORDS = ("cold_start.jsonl", "metrics.jsonl", "validation.jsonl", "samples.jsonl")
STEPS = (
    "trainer.sft.save_interval=24",
    "trainer.sft.max_steps=24",
    "trainer.grpo.optimizer_steps_per_rollout=4",
    "model.global_batch_size=4",
    "model.micro_batch_size=2",
    "model.grpo.routing_replay.mode=R3",  # a rollout in flight has routes
    "exp_manager.create_tensorboard_logger=false",
)
# Two processes, tensor and expert parallel.
LAYOUT = (
    *STEPS,
    "model.tensor_model_parallel_size=2",
    "model.sequence_parallel=true",
    "model.expert_model_parallel_size=2",
    "model.optim.name=mcore_distributed_optim",
    "model.sft.optim.name=mcore_distributed_optim",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A run of two processes that went through without a break."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    train(run_dir, *LAYOUT, processes=2)
    return run_dir


def test_a_kill_of_all_at_any_moment_of_a_save(finished, tmp_path):
    """kill -9 of every process at twenty random moments while a checkpoint is being written."""
    run_dir, generator = tmp_path / "killed", random.Random(0)
    every_step = (*LAYOUT, "trainer.sft.save_interval=1")  # so that only the one in hand can be lost
    lives = in_save = 0
    while lives < 20:
        process = start(run_dir, *every_step, processes=2)
        for _ in range(2):  # the first save is whole, so every life gets further; the second is not
            wait_for(process, lambda: not partial(run_dir))  # what the kill before left is cleaned up
            wait_for(process, lambda: partial(run_dir))
            pids = [p.pid for p in psutil.Process(process.pid).children(recursive=True)]
        assert process.poll() is None, "the run came to its end before twenty kills"
        time.sleep(generator.uniform(0, 0.04))
        for pid in [process.pid, *pids]:
            os.kill(pid, signal.SIGKILL)
        process.communicate()
        lives += 1
        in_save += bool(partial(run_dir))
    assert in_save >= 8, f"only {in_save} of {lives} kills met a save"
    train(run_dir, *every_step, processes=2)
    assert not [p for p in (run_dir / "checkpoints").iterdir() if p.name.startswith(".")]
    assert_same_records(run_dir, finished)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_one_rank_in_a_step(finished, tmp_path, victim):
    """kill -9 of one rank: the other ends with one message that names it, and the same command goes on."""
    run_dir = tmp_path / "killed"
    process = start(run_dir, *LAYOUT, processes=2)
    wait_for(process, lambda: count(run_dir / "metrics.jsonl") >= 2)
    rank_process(process, victim).kill()
    killed = time.monotonic()
    _, err = process.communicate(timeout=60)  # all have ended within a minute
    assert process.returncode != 0
    assert len(re.findall(r"^nemo-sspo: error: ", err, re.MULTILINE)) == 1, err
    assert re.search(rf"rank {victim} \(.*\) ended without a word", err), err
    assert time.monotonic() - killed < 60
    train(run_dir, *LAYOUT, processes=2)
    assert_same_records(run_dir, finished)


@pytest.mark.parametrize(
    ("number", "when"), [(signal.SIGTERM, "generating"), (signal.SIGUSR1, "training")], ids=["generating", "training"]
)
def test_a_stop_within_a_rollout(finished, tmp_path, number, when):
    """The step in hand is finished, the rollout in flight saved with it: nothing is generated twice."""
    run_dir = tmp_path / "stopped"
    process = start(run_dir, *LAYOUT, processes=2)
    wait_for(process, lambda: count(run_dir / "cold_start.jsonl"))
    ranks = [rank_process(process, rank) for rank in range(2)]
    if when == "generating":
        wait_for(process, lambda: (run_dir / "checkpoints" / "step_000001").exists())
    else:
        wait_for(process, lambda: count(run_dir / "metrics.jsonl"))
    for rank in ranks:
        rank.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode != 0  # torchrun's own; its processes end with 75
    done = "step_000001_0*" if when == "generating" else "step_000000_0*"
    (newest,) = (run_dir / "checkpoints").glob(done)
    assert (newest / "rollout.pt").is_file()
    train(run_dir, *LAYOUT, processes=2)
    assert_same_records(run_dir, finished)


def test_a_run_goes_on_under_another_layout(finished, tmp_path):
    """Two processes, tensor and expert parallel, then one alone: the same records but for the last digits."""
    run_dir = tmp_path / "moved"
    process = start(run_dir, *LAYOUT, processes=2)
    wait_for(process, lambda: count(run_dir / "metrics.jsonl") >= 3)
    for rank in range(2):
        rank_process(process, rank).terminate()
    process.communicate(timeout=60)
    train(run_dir, *STEPS)
    metrics, expected = (lines(folder / "metrics.jsonl") for folder in (run_dir, finished))
    assert len(metrics) == len(expected)
    for mine, theirs in zip(metrics, expected, strict=True):
        assert mine["reward/mean"] == theirs["reward/mean"]
        assert mine["loss/mean"] == pytest.approx(theirs["loss/mean"], rel=1e-3, abs=1e-5)


def test_one_process_evaluates_what_two_have_trained(finished):
    result = subprocess.run(command("eval", "--run", str(finished)), capture_output=True, text=True, check=True)
    expected = json.loads((finished / "summary.json").read_text())["final_pass_at_1"]
    assert json.loads(result.stdout)["pass_at_1"] == expected


def test_a_loss_that_stays_not_finite_ends_the_run(tmp_path):
    run_dir = tmp_path / "run"
    result = train(run_dir, "model.init_method_std=1e38", "trainer.grpo.max_skipped_steps=3", status=1)
    assert "3 such steps in a row, which is trainer.grpo.max_skipped_steps" in result.stderr
    files = sorted((run_dir / "skipped").iterdir())
    assert len(files) == 3
    batch = torch.load(files[0], weights_only=True)
    assert {"tokens", "policy_logprobs", "loss", "grad_norm"} <= batch.keys()


def test_a_full_disk_stops_the_run_where_that_is_asked_for(tmp_path):
    def small_files() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    process = start(
        tmp_path / "run",
        "exp_manager.checkpoint_callback_params.on_error=stop",
        "exp_manager.create_tensorboard_logger=false",
        "trainer.sft.save_interval=1",
        before=small_files,
    )
    out, err = process.communicate(timeout=120)
    assert process.returncode == 1, out + err
    assert re.search(r"checkpoint cold_start_000001 can't be written \(.*File too large", err), err
    assert not list((tmp_path / "run" / "checkpoints").iterdir())


def wait_for(process: subprocess.Popen, condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 120
    while not condition() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)


def partial(run_dir: Path) -> list[Path]:
    return list((run_dir / "checkpoints").glob(".*.partial"))


def count(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def rank_process(launcher: subprocess.Popen, rank: int) -> psutil.Process:
    """The process of one rank under torchrun."""
    children = psutil.Process(launcher.pid).children(recursive=True)
    (found,) = [p for p in children if p.environ().get("RANK") == str(rank)]
    return found


def assert_same_records(run_dir: Path, expected: Path) -> None:
    for name in RECORDS:
        assert without_times(lines(run_dir / name)) == without_times(lines(expected / name)), name
