"""What routing replay does to a run: none, R2 and R3, for SSPO and GRPO, on rollouts up to 4 and up to 16 steps old.

``python -m tests.benchmarks.replay_study`` trains the model of ``make train`` (some 36 runs of a minute or two; each
seed's cold start is shared) and prints one table. Runs that an earlier call has finished are not trained again.

Columns, each the mean over seeds, with the lowest and highest seed in brackets:

* std of log-ratio, largest ratio, gate weight: at the last optimizer step on each rollout, where the policy is furthest
  from the one that sampled; averaged over rollouts (of the largest ratio: the median over rollouts)
* mismatch: share of the replayed experts that the live router would not have chosen, likewise
* reward: mean of the last eighth of the rollouts; pass@1: greedy, on the held-out test problems, at the end
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

from tests.benchmarks.measure import print_table

MODES, OBJECTIVES, STEPS, SEEDS = ("none", "R2", "R3"), ("sspo", "grpo"), (4, 16), (1234, 2, 3)


def train(run_dir: Path, *overrides: str) -> None:
    """One run through the command line; shows its errors."""
    command = [sys.executable, "-m", "nemo_sspo", "train", "--config-name", "tiny_moe_cpu"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    settings = [f"exp_manager.explicit_log_dir={run_dir}", "exp_manager.create_tensorboard_logger=false"]
    subprocess.run([*command, *settings, *overrides], env=environment, stdout=subprocess.DEVNULL, check=True)


def study(folder: Path, rollouts: int, seeds: list[int]) -> dict[tuple[str, int, str], list[Path]]:
    """(objective, steps, mode) -> the finished runs, one a seed."""
    runs: dict[tuple[str, int, str], list[Path]] = {}
    for seed in seeds:
        cold = folder / f"cold_start_{seed}"
        if not (cold / "summary.json").exists():
            train(cold, f"model.seed={seed}", "trainer.grpo.max_steps=0", "trainer.grpo.run_validation_step_0=false")
        for objective, steps, mode in product(OBJECTIVES, STEPS, MODES):
            run = folder / f"{objective}_{steps}_{mode}_{seed}"
            runs.setdefault((objective, steps, mode), []).append(run)
            if (run / "summary.json").exists():
                continue
            shutil.rmtree(run, ignore_errors=True)
            shutil.copytree(cold / "checkpoints", run / "checkpoints")  # the run goes on from it
            train(
                run,
                f"model.seed={seed}",
                f"model.grpo.objective.name={objective}",
                f"model.grpo.routing_replay.mode={mode}",
                f"trainer.grpo.max_steps={rollouts}",
                f"trainer.grpo.optimizer_steps_per_rollout={steps}",
                f"model.global_batch_size={128 // steps}",
                "trainer.grpo.val_check_interval=0",
                "trainer.grpo.save_interval=1000",
            )
            print(f"{run.name}: {json.loads((run / 'summary.json').read_text())}", flush=True)
    return runs


def measures(run: Path) -> dict[str, float]:
    """One run's numbers."""
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = list({record["rollout"]: record for record in records}.values())

    def over(key: str, combine: Callable[[list[float]], float] = statistics.fmean) -> float:
        return combine([record[key] for record in last if record.get(key) is not None] or [float("nan")])

    return {
        "std of log-ratio": over("log_ratio/std"),
        "largest ratio": over("ratio/max", statistics.median),
        "gate weight": over("gate_weight/mean"),
        "mismatch": over("routing/mismatch_rate"),
        "reward": statistics.fmean(record["reward/mean"] for record in last[-max(len(last) // 8, 1) :]),
        "pass@1": json.loads((run / "summary.json").read_text())["final_pass_at_1"],
    }


def print_study(runs: dict[tuple[str, int, str], list[Path]], rollouts: int) -> None:
    rows: list[list[str]] = []
    names: list[str] = []
    for (objective, steps, mode), folders in runs.items():
        values: dict[str, list[Any]] = {}
        for folder in folders:
            for name, value in measures(folder).items():
                values.setdefault(name, []).append(value)
        names = list(values)
        rows.append([objective, str(steps), mode, *(cell(v) for v in values.values())])
    title = f"Routing replay, {rollouts} rollouts of 128 responses, {len(next(iter(runs.values())))} seeds"
    print_table(title, ["objective", "steps a rollout", "replay", *names], rows)


def cell(values: list[float]) -> str:
    """Mean, lowest and highest; nothing where nothing was measured."""
    if math.isnan(values[0]):
        return ""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f}-{max(values):.3f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("results/replay_study"), help="where the runs are kept")
    parser.add_argument("--rollouts", type=int, default=48)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    options = parser.parse_args()
    print_study(study(options.folder.absolute(), options.rollouts, options.seeds), options.rollouts)


if __name__ == "__main__":
    main()
