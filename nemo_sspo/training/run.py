"""A training run from its config to its report."""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from nemo_sspo.checkpoint import Checkpoint, find_whole
from nemo_sspo.config import load_run_config
from nemo_sspo.config.layout import data_parallel_size
from nemo_sspo.config.resolve import to_yaml
from nemo_sspo.config.schema import RunConfig
from nemo_sspo.data import build_datasets, build_tokenizer
from nemo_sspo.data.dataset import Datasets
from nemo_sspo.data.tokenizer import Tokenizer
from nemo_sspo.errors import UserError
from nemo_sspo.generation.native import NativeEngine
from nemo_sspo.model import build_model, parameter_count, transformer_engine
from nemo_sspo.parallel.ranks import on_rank_zero, rank, world_size
from nemo_sspo.plan import memory_warning
from nemo_sspo.report.jsonl import read_lines
from nemo_sspo.routing import RoutingReplay
from nemo_sspo.training.actor import Actor
from nemo_sspo.training.convert import load_pretrained
from nemo_sspo.training.distributed import process_groups
from nemo_sspo.training.recorder import VALIDATION, RunRecorder
from nemo_sspo.training.stop import EXIT_RESUMABLE, stop_on_signals
from nemo_sspo.training.trainer import Trainer

# What may differ between a run and its continuation: how long, how often, where, how cut; never what is computed.
_MAY_CHANGE = (
    "trainer.num_nodes",
    "trainer.devices",
    "trainer.sft.save_interval",
    "trainer.grpo.max_steps",
    "trainer.grpo.generation_rollout_mbs",
    "trainer.grpo.val_",
    "trainer.grpo.save_interval",
    "trainer.grpo.num_logged_samples",
    "exp_manager.",
    "trainer.grpo.max_skipped_steps",
    "model.tensor_model_parallel_size",
    "model.sequence_parallel",
    "model.pipeline_model_parallel_size",
    "model.virtual_pipeline_model_parallel_size",
    "model.expert_model_parallel_size",
    "model.expert_tensor_parallel_size",
    "model.context_parallel_size",
    "model.activations_checkpoint_",
    "model.optim.name",
    "model.sft.optim.name",
    "model.grpo.offload_adam_states",
    "model.micro_batch_size",
    "model.grpo.forward_micro_batch_size",
)


def run_training(config: RunConfig) -> int:
    """Train as `config` says; returns the exit status: 0 done, 75 stopped on a signal and resumable.

    Every process of the run calls it. Nothing is written before the data are read and the run's folder is understood.
    """
    choose_accelerator(config.trainer.accelerator)
    run_dir = Path(config.exp_manager.explicit_log_dir)
    tokenizer, datasets = load_data(config)
    _check_data(config, datasets)
    _notes_on_the_gpu(config, tokenizer)
    check_continues(config, run_dir)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(stop_on_signals())
        groups = stack.enter_context(process_groups(config.model))
        checkpoint = find_whole(run_dir / "checkpoints")
        actor, engine = build_policy(config, tokenizer, groups)
        if checkpoint is None and config.pretrained_checkpoint.restore_from_path is not None:
            load_pretrained(actor.policy, Path(config.pretrained_checkpoint.restore_from_path), config.model)
        recorder = on_rank_zero(lambda: open_recorder(config, run_dir))
        count = parameter_count(actor.policy)
        if recorder is not None:
            stack.enter_context(recorder)
            _say_start(run_dir, count, checkpoint)
        trainer = Trainer(config, actor, engine, tokenizer, datasets, groups, run_dir, stop, recorder)
        finished = trainer.fit(checkpoint)
        if recorder is not None:
            if finished:
                recorder.summary(summary(run_dir, config, trainer))
            _say_where(run_dir, finished, stop.signal_name)
    return 0 if finished else EXIT_RESUMABLE


def choose_accelerator(name: str) -> None:
    """Hide the GPUs from ``trainer.accelerator=cpu``; refuse ``gpu`` where there is none."""
    if name == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif not torch.cuda.is_available():
        raise UserError(
            "trainer.accelerator: got gpu, but PyTorch finds no CUDA device; set trainer.accelerator=cpu, or install a "
            "CUDA build of PyTorch and check nvidia-smi"
        )


def load_data(config: RunConfig) -> tuple[Tokenizer, Datasets]:
    """The tokenizer, and every split of problems, tokenised."""
    tokenizer = build_tokenizer(config.model.tokenizer)
    datasets = build_datasets(
        config.model.data,
        tokenizer,
        seed=config.model.seed,
        encoder_seq_length=config.model.encoder_seq_length,
        max_response_length=config.model.grpo.length_params.max_length,
    )
    return tokenizer, datasets


def build_policy(config: RunConfig, tokenizer: Tokenizer, groups: Any) -> tuple[Actor, NativeEngine]:
    """The actor, and the engine that generates with its weights."""
    policy = build_model(config.model, tokenizer.vocab_size, groups, config.trainer.precision)
    distributed_optimizer = config.model.optim.name == "mcore_distributed_optim"
    replayed = config.model.grpo.routing_replay.mode != "none"
    routing = RoutingReplay(policy.chunks, policy.config, groups) if replayed else None
    actor = Actor(policy, config.model.micro_batch_size, distributed_optimizer, routing)
    engine = NativeEngine(policy, config.model.encoder_seq_length, config.trainer.grpo.generation_rollout_mbs, routing)
    return actor, engine


def open_recorder(config: RunConfig, run_dir: Path) -> RunRecorder:
    """The run's folder, made if need be, with its config and environment."""
    recorder = RunRecorder(run_dir, tensorboard=config.exp_manager.create_tensorboard_logger)
    recorder.start(to_yaml(config), environment(config))
    return recorder


def check_continues(config: RunConfig, run_dir: Path) -> None:
    """Make sure that what `run_dir` holds, if anything, is an earlier part of this run.

    Raises:
        UserError: the folder holds another run, or it holds one and ``exp_manager.resume_if_exists`` is false.
    """
    if not (run_dir / "config.yaml").is_file():
        return
    if not config.exp_manager.resume_if_exists:
        raise UserError(
            f"exp_manager.explicit_log_dir: {run_dir} holds a run and exp_manager.resume_if_exists is false; choose "
            "another folder, delete this one, or set exp_manager.resume_if_exists=true to continue it"
        )
    before, now = _flat(asdict(load_run_config(run_dir))), _flat(asdict(config))
    changed = [key for key in now if before.get(key) != now[key] and not key.startswith(_MAY_CHANGE)]
    if changed:
        shown = [f"{key} was {before.get(key)!r} and is {now[key]!r}" for key in changed[:4]]
        differences = ", ".join(shown) + (f" and {len(changed) - 4} more keys" if len(changed) > 4 else "")
        raise UserError(
            f"exp_manager.explicit_log_dir: {run_dir} holds a run of another config ({differences}); choose another "
            "folder, delete this one, or set the keys back to continue it"
        )


def environment(config: RunConfig) -> dict[str, Any]:
    """What the run ran on: versions, git revision, layout, command."""
    versions = {"python": platform.python_version()}
    for package in ("nemo-sspo", "torch", "megatron-core", "transformer-engine", "tensorrt-llm", "transformers"):
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    model = config.model
    return {
        "versions": versions,
        "git_revision": _git_revision(),
        "layout": {
            "world_size": world_size(),
            "data_parallel_size": data_parallel_size(model, world_size()),
            **{name: value for name, value in vars(model).items() if name.endswith("_parallel_size")},
        },
        "layers": "Transformer Engine" if transformer_engine.chosen(model.transformer_engine) else "Megatron-Core",
        "platform": platform.platform(),
        "command": sys.argv,
    }


def summary(run_dir: Path, config: RunConfig, trainer: Trainer) -> dict[str, Any]:
    """The numbers of summary.json. pass@1 is greedy, on the test split, which nothing else looks at."""
    records = [record for _, record in read_lines(run_dir / VALIDATION) if record["split"] == "test"]
    first, last = records[0], records[-1]
    grpo, position = config.trainer.grpo, trainer.position
    responses = position.rollout * grpo.num_prompts_per_grpo_step * grpo.samples_per_prompt
    return {
        "cold_start_pass_at_1": first["pass_at_1"],
        "final_pass_at_1": last["pass_at_1"],
        "lift": last["pass_at_1"] - first["pass_at_1"],
        "cold_start_think_fraction": first["think_fraction"],
        "final_think_fraction": last["think_fraction"],
        "final_sampled_accuracy": last["sampled_accuracy"],
        "grpo_steps": position.rollout,
        "optimizer_steps": position.step,
        "cold_start_steps": position.cold_start_step,
        "responses": responses,
        "samples_per_second": responses / position.seconds if position.seconds else None,
        "seconds": position.seconds,
    }


def _say_start(run_dir: Path, parameters: int, checkpoint: Checkpoint | None) -> None:
    size = f"{parameters:,} parameters, {world_size()} process{'es' if world_size() > 1 else ''}"
    print(f"{run_dir}: {size}, {'resuming from ' + checkpoint.path.name if checkpoint else 'starting'}", flush=True)


def _say_where(run_dir: Path, finished: bool, signal_name: str | None) -> None:
    from nemo_sspo.report import write_report  # imports Matplotlib

    report = write_report(run_dir)
    if finished:
        print(f"Done. Report: {report}")
    else:
        why = f"Stopped on {signal_name}" if signal_name else "Stopped: another process was asked to"
        print(f"{why}; everything is saved in {run_dir}. To go on, run the same command again.")


def _check_data(config: RunConfig, datasets: Datasets) -> None:
    """Say what the data's loading left out; refuse a cold start that has nothing to learn from."""
    notes = "; ".join(datasets.notes)
    if config.trainer.sft.max_steps and not datasets.sft:
        raise UserError(
            f"trainer.sft.max_steps: got {config.trainer.sft.max_steps}, but no training problem has a worked response "
            f'to learn from{f" ({notes})" if notes else ""}; give model.data.data_prefix.sft, add "response" to the '
            "lines, raise model.grpo.length_params.max_length, or set trainer.sft.max_steps=0"
        )
    if notes and rank() == 0:
        print(f"Note: {notes}")


def _notes_on_the_gpu(config: RunConfig, tokenizer: Tokenizer) -> None:
    """Say before a model is built which layers it lacks, and that its layout looks too large for the GPU."""
    wanted = config.model.transformer_engine
    fused = transformer_engine.chosen(wanted)  # on every rank alike: it may raise
    if not torch.cuda.is_available() or rank() != 0:
        return
    missing = transformer_engine.why_not() if wanted is None else None
    if missing is not None:
        print(f"Note: {missing}; layers are Megatron-Core's own, whose attention keeps its scores", flush=True)
    attention = "flash" if fused and config.trainer.precision == "bf16" else "local"
    held = torch.cuda.get_device_properties(0).total_memory
    warning = memory_warning(config, world_size(), held, tokenizer.vocab_size, attention)
    if warning is not None:
        print(f"Note: {warning}", flush=True)


def _flat(node: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(node, dict):
        return {prefix.removesuffix("."): node}
    return {key: leaf for name, value in node.items() for key, leaf in _flat(value, f"{prefix}{name}.").items()}


def _git_revision() -> str | None:
    here = Path(__file__).parent
    result = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return result.stdout.strip() or None
