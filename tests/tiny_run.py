"""Real runs through the command line, small enough for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.tiny import TINY

SMALL = (
    *TINY,
    "trainer.sft.max_steps=20",  # enough that some responses earn something, and advantages are not all zero
    "model.sft.optim.lr=2e-2",
    "model.sft.optim.sched.warmup_steps=0",
    "model.optim.lr=1e-3",
    "trainer.grpo.max_steps=3",
    "trainer.grpo.num_prompts_per_grpo_step=4",
    "trainer.grpo.samples_per_prompt=4",
    "trainer.grpo.optimizer_steps_per_rollout=2",
    "trainer.grpo.val_check_interval=2",
    "trainer.grpo.val_num_prompts_per_grpo_step=8",
    "trainer.grpo.save_interval=1",
    "model.global_batch_size=8",
    "model.micro_batch_size=4",
    "model.sft.global_batch_size=8",
    "model.grpo.length_params.max_length=12",
    "model.data.synthetic.num_test=8",
    "model.data.synthetic.num_validation=8",
    "model.data.synthetic.max_digits=2",
    "model.data.synthetic.num_train=500",
)


def command(*arguments: str, processes: int = 1) -> list[str]:
    """`nemo-sspo ARGUMENTS`, under torchrun when there are several processes."""
    if processes == 1:
        return [sys.executable, "-m", "nemo_sspo", *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    return [*launcher, "-m", "nemo_sspo", *arguments]


def environment() -> dict[str, str]:
    """One thread a process: the numbers of two processes and one are then computed alike."""
    return os.environ | {"OMP_NUM_THREADS": "1"}


def start(
    run_dir: Path, *overrides: str, processes: int = 1, before: Callable[[], object] | None = None
) -> subprocess.Popen:
    """A small training run in the background, with its processes in a group of their own.

    `before` runs in the new process before the program does.
    """
    arguments = [
        "train",
        "--config-name",
        "tiny_moe_cpu",
        f"exp_manager.explicit_log_dir={run_dir}",
        *SMALL,
        *overrides,
    ]
    return subprocess.Popen(
        command(*arguments, processes=processes),
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=before,
    )


def train(run_dir: Path, *overrides: str, processes: int = 1, status: int = 0) -> subprocess.CompletedProcess:
    """A small training run to its end; fails with its output when the exit status is another than `status`."""
    process = start(run_dir, *overrides, processes=processes)
    out, err = process.communicate(timeout=300)
    assert process.returncode == status, f"exit status {process.returncode}, expected {status}\n{out}\n{err}"
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def lines(path: Path) -> list[dict]:
    """The records of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def without_times(records: list[dict]) -> list[dict]:
    """The records without what a clock decided."""
    return [{k: v for k, v in record.items() if not k.startswith("time/")} for record in records]
