"""Evaluate a run's checkpoint on its held-out problems."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path

import torch

from nemo_sspo.checkpoint import Checkpoint, find_whole, list_checkpoints, load_weights, read_checkpoint
from nemo_sspo.config import load_run_config
from nemo_sspo.config.layout import layout_complaints
from nemo_sspo.config.resolve import shape_fields
from nemo_sspo.config.schema import ModelConfig, RunConfig
from nemo_sspo.errors import UserError
from nemo_sspo.parallel.ranks import rank, world_size
from nemo_sspo.seeds import sample_seed
from nemo_sspo.training.distributed import process_groups
from nemo_sspo.training.rollout import sampling_params
from nemo_sspo.training.run import build_policy, choose_accelerator, load_data
from nemo_sspo.training.validation import answer_problems, validate


def run_evaluation(run_dir: Path, checkpoint: str | None, split: str, samples: int) -> int:
    """Print pass@1 of a checkpoint (None: the newest) on a run's ``validation`` or ``test`` split, as one JSON object.

    With `samples` N above 0 each problem is also answered N times at the run's temperature: ``mean_at_N`` is the share
    of right answers, ``pass_at_N`` the share of problems with at least one. Returns the exit status 0.

    Raises:
        UserError: no such run, checkpoint or split.
    """
    config = _fitting_layout(load_run_config(run_dir))
    choose_accelerator(config.trainer.accelerator)
    tokenizer, datasets = load_data(config)
    problems = getattr(datasets, split)
    grpo = config.model.grpo
    with process_groups(config.model) as groups:
        found = _checkpoint(run_dir, checkpoint)
        actor, engine = build_policy(config, tokenizer, groups)
        sampling = sampling_params(
            tokenizer, grpo.length_params.max_length, grpo.sampling_params.temperature, actor.policy.vocab_size
        )
        load_weights(found, actor.policy, shape_fields(config.model))
        result = validate(engine, problems, tokenizer, sampling, groups.dp_cp, config.model.seed)
        right = torch.zeros(samples, len(problems))
        for i in range(samples):
            seed = sample_seed(config.model.seed, "eval", i)
            records = answer_problems(engine, problems, tokenizer, sampling, groups.dp_cp, seed)
            right[i] = torch.tensor([r["answer"] for r in records])
    if samples:
        result |= {f"mean_at_{samples}": float(right.mean()), f"pass_at_{samples}": float(right.amax(0).mean())}
    if rank() == 0:
        print(json.dumps({"run": str(run_dir), "checkpoint": found.path.name, "split": split} | result, indent=2))
    return 0


def _fitting_layout(config: RunConfig) -> RunConfig:
    """The run's layout where there are processes for it; otherwise data parallel: checkpoints fit either."""
    if next(layout_complaints(config, world_size()), None) is None:
        return config
    defaults = {f.name: f.default for f in fields(ModelConfig) if f.name.endswith("_parallel_size")}
    return replace(config, model=replace(config.model, sequence_parallel=False, **defaults))


def _checkpoint(run_dir: Path, name: str | None) -> Checkpoint:
    folder = run_dir / "checkpoints"
    if name is not None and (folder / name / "state.json").is_file():
        return read_checkpoint(folder / name)
    if name is not None:
        names = ", ".join(c.path.name for c in list_checkpoints(folder))
        raise UserError(f"--checkpoint: got {name}, there are {names or 'none'} in {folder}")
    newest = find_whole(folder)
    if newest is None:
        raise UserError(f"{folder}: no checkpoint; train first")
    return newest
