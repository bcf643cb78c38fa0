"""slurm/sspo_moe.sub, submitted to a real Slurm: whole runs, a requeue, mistakes, and what reaches the program."""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path

import pytest
import yaml

from tests.slurm.cluster import Cluster
from tests.tiny_run import SMALL, lines, without_times

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).parents[2] / "slurm" / "sspo_moe.sub"
VENV = str(Path(sys.executable).parents[1])
RUN = (
    *SMALL,
    "trainer.sft.max_steps=8",
    "trainer.grpo.max_steps=2",
    "trainer.grpo.optimizer_steps_per_rollout=4",
    "model.global_batch_size=4",
    "model.micro_batch_size=2",
    "exp_manager.create_tensorboard_logger=false",
    "model.tensor_model_parallel_size=2",
    "model.sequence_parallel=true",
    "model.expert_model_parallel_size=2",
    "model.optim.name=adam",
    "model.sft.optim.name=adam",
)
STEPS = 8
# Everything that a shell, Slurm's file name patterns or Hydra could take for their own.
ODD_FOLDER = """two tasks [%t], "b" $HOME *"""


@pytest.fixture(scope="module")
def finished(slurm, tmp_path_factory) -> Path:
    """The folder of a job that went through without a break."""
    folder = tmp_path_factory.mktemp("finished")
    job = train(slurm, folder, f"exp_manager.explicit_log_dir='{ODD_FOLDER}'")
    shown = slurm.wait_for_end(job)
    assert shown["JobState"] == "COMPLETED", everything_said(folder)
    (folder / "job").write_text(job)
    return folder


def test_two_tasks_train_one_model(finished):
    run_dir, job = finished / ODD_FOLDER, (finished / "job").read_text()
    assert [record["step"] for record in lines(run_dir / "metrics.jsonl")] == list(range(1, STEPS + 1))
    assert json.loads((run_dir / "summary.json").read_text())["optimizer_steps"] == STEPS
    layout = json.loads((run_dir / "environment.json").read_text())["layout"]
    assert (layout["world_size"], layout["tensor_model_parallel_size"]) == (2, 2)
    logs = sorted(path.name for path in run_dir.glob("slurm-*"))
    assert logs == [f"slurm-{job}-task-0.log", f"slurm-{job}-task-1.log", f"slurm-{job}.out"]
    assert "Done. Report:" in (run_dir / f"slurm-{job}-task-0.log").read_text()
    assert "2 tasks" in (run_dir / f"slurm-{job}.out").read_text()
    assert f"logs in {run_dir}" in (finished / f"slurm-{job}.out").read_text()


def test_brackets_spaces_and_quotes_reach_the_config(finished):
    config = yaml.safe_load((finished / ODD_FOLDER / "config.yaml").read_text())
    assert config["exp_manager"]["explicit_log_dir"] == ODD_FOLDER


def test_a_requeued_job_goes_on_by_itself(slurm, finished, tmp_path):
    job = train(slurm, tmp_path)
    metrics = tmp_path / "results" / "tiny_moe_cpu" / "metrics.jsonl"
    slurm.wait(job, lambda shown: metrics.exists() or shown["JobState"] == "FAILED")
    slurm.requeue(job)
    shown = slurm.wait_for_end(job)
    assert (shown["JobState"], shown["Restarts"]) == ("COMPLETED", "1"), everything_said(tmp_path)
    log = (metrics.parent / f"slurm-{job}-task-0.log").read_text()
    assert "Stopped on SIGTERM" in log
    assert "resuming from " in log
    assert (tmp_path / f"slurm-{job}.out").read_text().count(f"logs in {metrics.parent}") == 2  # not written anew
    assert without_times(lines(metrics)) == without_times(lines(finished / ODD_FOLDER / "metrics.jsonl"))


def test_a_misspelt_key_ends_the_job_at_once(slurm, tmp_path):
    started = time.monotonic()
    job = train(slurm, tmp_path, "model.num_layerz=3")
    shown = slurm.wait_for_end(job)
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "2:0")
    said = (tmp_path / f"slurm-{job}.out").read_text()
    assert [line for line in said.splitlines() if line.startswith("nemo-sspo: error: ")] == [
        "nemo-sspo: error: override 'model.num_layerz=3': there is no key model.num_layerz; did you mean "
        "model.num_layers?"
    ]
    assert not (tmp_path / "results").exists()
    assert time.monotonic() - started < 30


def test_a_missing_file_ends_every_task(slurm, tmp_path):
    """A mistake that only the program itself can see."""
    job = train(slurm, tmp_path, "model.data.data_prefix.train=[nowhere.jsonl]")
    shown = slurm.wait_for_end(job)
    assert (shown["JobState"], shown["ExitCode"]) == ("FAILED", "2:0"), everything_said(tmp_path)
    said = (tmp_path / "results" / "tiny_moe_cpu" / f"slurm-{job}.out").read_text()
    assert said.count("nemo-sspo: error: ") == 1
    assert "nowhere.jsonl" in said


def test_one_task_a_gpu_and_its_place_in_the_run(slurm, tmp_path):
    """Without --ntasks. The program is one that writes down what it was given."""
    arguments = ["a=[1,'b c']", 'd="e"', "$HOME", "*", "f\\g", "", "line\nbreak", "é"]
    venv = pretended_venv(tmp_path, 'env >"$PWD/env-$RANK"; printf "%s\\0" "$@" >"$PWD/arguments-$RANK"')
    job = slurm.submit("--gpus-per-node=2", "--exclusive", str(SCRIPT), *arguments, folder=tmp_path, VENV=venv)
    assert slurm.wait_for_end(job)["JobState"] == "COMPLETED", everything_said(tmp_path)
    places = [dict(line.split("=", 1) for line in text(tmp_path / f"env-{rank}") if "=" in line) for rank in (0, 1)]
    assert [(p["RANK"], p["LOCAL_RANK"], p["WORLD_SIZE"]) for p in places] == [("0", "0", "2"), ("1", "1", "2")]
    assert places[0]["MASTER_ADDR"] == places[1]["MASTER_ADDR"] == slurm.show(job)["NodeList"]
    assert places[0]["MASTER_PORT"] == places[1]["MASTER_PORT"]
    command = ["-m", "nemo_sspo", "train", "--config-name", "qwen3_30b_a3b_sspo", *arguments]
    for rank in (0, 1):
        assert (tmp_path / f"arguments-{rank}").read_text().split("\0") == [*command, ""]


def test_a_task_that_fails_alone_ends_the_others(slurm, tmp_path):
    """Before they know each other: nothing but Slurm can end them."""
    venv = pretended_venv(tmp_path, '[ "$RANK" = 1 ] && exit 3; sleep 300')
    started = time.monotonic()
    job = slurm.submit("--ntasks=2", str(SCRIPT), folder=tmp_path, VENV=venv, SLURM_WAIT="2")
    assert slurm.wait_for_end(job, seconds=60)["JobState"] == "FAILED"
    assert time.monotonic() - started < 30


def test_a_virtual_environment_that_is_not_there(slurm, tmp_path):
    job = slurm.submit(str(SCRIPT), folder=tmp_path, VENV="nowhere")
    assert slurm.wait_for_end(job)["ExitCode"] == "2:0"
    assert "there is no nowhere/bin/python; set VENV" in (tmp_path / f"slurm-{job}.out").read_text()


def test_a_container_s_options_reach_both_steps(slurm, tmp_path):
    """pyxis adds them to srun; a pretended srun writes down what it was given."""
    srun = tmp_path / "bin" / "srun"
    srun.parent.mkdir()
    srun.write_text(f'#!/bin/sh\necho "$*" | tr "\\n" " " >>srun\necho >>srun\necho {shlex.quote(str(tmp_path))}/run\n')
    srun.chmod(0o755)
    variables = {
        "CONTAINER_IMAGE": "image.sqsh",
        "CONTAINER_MOUNTS": "/data:/data",
        "PATH": f"{srun.parent}:{os.environ['PATH']}",
    }
    job = slurm.submit(str(SCRIPT), "a=1", folder=tmp_path, **variables)
    assert slurm.wait_for_end(job)["JobState"] == "COMPLETED", everything_said(tmp_path)
    calls = text(tmp_path / "srun")
    assert len(calls) == 2
    for call in calls:
        options = ("image=image.sqsh", f"mounts={tmp_path}:{tmp_path},/data:/data", f"workdir={tmp_path}")
        assert all(f" --container-{option} " in call for option in options)
    assert " python -m nemo_sspo train " in calls[1]


def train(slurm: Cluster, folder: Path, *overrides: str) -> str:
    """Submit a small run on two cores; returns the job's number."""
    variables = {"CONFIG_NAME": "tiny_moe_cpu", "VENV": VENV}
    return slurm.submit("--ntasks=2", str(SCRIPT), *RUN, *overrides, folder=folder, **variables)


def pretended_venv(folder: Path, program: str) -> str:
    """A virtual environment whose python says that the run's folder is `folder`/run and, as a task, runs `program`."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    read_config = f"echo {shlex.quote(str(folder / 'run'))}"
    python.write_text(f'#!/usr/bin/env bash\nif [ "$1" = -c ]; then {read_config}; else {program}; fi\n')
    python.chmod(0o755)
    return str(folder / "venv")


def text(path: Path) -> list[str]:
    return path.read_text().splitlines()


def everything_said(folder: Path) -> str:
    logs = [*folder.rglob("slurm-*.out"), *folder.rglob("slurm-*.log")]
    return "\n".join(f"{log}:\n{log.read_text()[-3000:]}" for log in logs)
