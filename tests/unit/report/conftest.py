"""A run's folder with random but plausible numbers, written by the recorder as a real run writes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from nemo_sspo.report import log_ratio_histogram
from nemo_sspo.training.recorder import RunRecorder


def write_run(folder: Path, *, seed: int = 1234, cold_start: int = 40, rollouts: int = 12, finished: bool = True,
              objective: dict[str, Any] | None = None, response: str = "<think>7+5=12</think><answer>12</answer>",
              steps_per_rollout: int = 4, moe_layers: int = 0) -> Path:  # fmt: skip
    """Write the folder; `rollouts=0` is a run before its GRPO stage, `moe_layers=0` one without routing replay."""
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> float:
        return float(torch.randn((), generator=generator)) * scale

    objective = objective or {"name": "sspo", "gate": "atanlog", "tau_pos": None, "tau_neg": None, "advantages": "grpo"}
    config = {
        "model": {"seed": seed, "num_layers": 3, "hidden_size": 96, "grpo": {"objective": objective}},
        "trainer": {"sft": {"max_steps": cold_start}, "grpo": {"max_steps": rollouts or 100}},
        "exp_manager": {"explicit_log_dir": str(folder)},
    }
    with RunRecorder(folder, tensorboard=False) as recorder:
        recorder.start(
            yaml.safe_dump(config), {"versions": {"torch": "2.9.0"}, "git_revision": "0123abc", "layout": {"dp": 1}}
        )
        for step in range(1, cold_start + 1):
            loss = 3 * 0.985 ** (step * 320 / cold_start) + 0.35 + abs(noise(0.03))
            recorder.cold_start(
                {"step": step, "loss/mean": loss, "grad_norm": 1 + noise(0.1), "lr": 2e-3, "time/step": 0.1}
            )
        if rollouts and cold_start:
            _validate(recorder, 0, rollouts, 0, noise)
        for rollout in range(1, rollouts + 1):
            progress = rollout / rollouts
            for inner in range(steps_per_rollout):
                step = (rollout - 1) * steps_per_rollout + inner + 1
                log_ratio = torch.randn(4000, generator=generator) * 0.06 * inner * (1 + progress)
                quantiles = torch.quantile(log_ratio, torch.tensor([0.01, 0.1, 0.5, 0.9, 0.99]))
                recorder.metrics({
                    "step": step, "rollout": rollout, "loss/mean": noise(0.01), "grad_norm": abs(0.6 + noise(0.15)),
                    "reward/mean": 1.1 + 0.7 * progress + noise(0.06),
                    "reward/answer": 0.4 + 0.45 * progress + noise(0.05),
                    "reward/format": min(1.0, 0.8 + 0.18 * progress + noise(0.02)), "reward/std": 0.4,
                    "response_length/mean": 22 + 9 * progress + noise(0.5),
                    "response_length/max": 40 + round(noise(2)), "entropy/mean": 0.42 - 0.25 * progress + noise(0.01),
                    "ratio/mean": log_ratio.exp().mean(), "ratio/max": log_ratio.max().exp(),
                    "log_ratio/quantiles": quantiles, "log_ratio/histogram": log_ratio_histogram(log_ratio),
                    "gate_weight/mean": 1 - 0.05 * inner, "lr": 3e-5 * (1 - 0.9 * (step - 1) / (4 * rollouts)),
                    **(_routing(moe_layers, rollout, inner) if moe_layers else {}),
                })  # fmt: skip
            sample = {"rollout": rollout, "prompt": f"{rollout}7+5=", "response": response, "gold": "12"}
            recorder.samples([{**sample, "reward": 2.0, "answer": 1.0, "format": 1.0}])
            if rollout % max(rollouts // 5, 1) == 0 or rollout == rollouts:
                _validate(recorder, rollout, rollouts, rollout * steps_per_rollout, noise)
        if finished and rollouts:
            recorder.summary({"cold_start_pass_at_1": 0.43, "final_pass_at_1": 0.93, "optimizer_steps": rollouts * 4,
                              "samples_per_second": 212.5, "seconds": 245.0})  # fmt: skip
    return folder


def _routing(layers: int, rollout: int, inner: int) -> dict[str, Any]:
    """Mismatch that begins each rollout at 0 and grows; which layer has most of it changes with the rollout."""
    by_layer = [0.1 * inner / rollout * ((1 + (layer + rollout) % layers) / layers) ** 2 for layer in range(layers)]
    return {
        "routing/load_imbalance": 1.5 + 0.1 * rollout, "routing/live_tokens": 0, "routing/bytes_per_token": 2 * layers,
        "routing/replayed_fraction": 1.0, "routing/mismatch_rate": sum(by_layer) / layers,
        "routing/mismatch_by_layer": by_layer,
    }  # fmt: skip


def _validate(recorder: RunRecorder, rollout: int, rollouts: int, step: int, noise) -> None:
    think = 0.46 + 0.5 * (rollout / rollouts) ** 0.7
    for split in ("validation", "test") if rollout in (0, rollouts) else ("validation",):
        recorder.validation({
            "rollout": rollout, "step": step, "split": split, "pass_at_1": 0.96 * think + noise(0.01),
            "sampled_accuracy": 0.8 * think + noise(0.01), "format": 0.97, "think_fraction": think,
            "pass_at_1_with_think": 0.95 + noise(0.01), "pass_at_1_without_think": 0.05 + abs(noise(0.01)),
            "response_length/mean": 24.0, "num_problems": 256,
        })  # fmt: skip


@pytest.fixture
def make_run(tmp_path):
    """``make_run(name, **options)`` writes a run's folder of that name and returns it."""
    return lambda name="run", **options: write_run(tmp_path / name, **options)
