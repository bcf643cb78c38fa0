"""The loop: cold start, then GRPO steps of one rollout and several optimizer steps; validate, record, save, stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from nemo_sspo.config.resolve import shape_fields
from nemo_sspo.config.schema import RunConfig
from nemo_sspo.data.batches import prompt_indices, supervised_batch
from nemo_sspo.data.dataset import Datasets
from nemo_sspo.data.tokenizer import Tokenizer
from nemo_sspo.generation import GenerationEngine
from nemo_sspo.objective import build_objective
from nemo_sspo.report.histogram import log_ratio_histogram
from nemo_sspo.seeds import sample_seed
from nemo_sspo.training.actor import Actor, StepResult
from nemo_sspo.training.checkpoint import (
    Checkpoint,
    Position,
    load_model,
    load_optimizer_state,
    save_checkpoint,
)
from nemo_sspo.training.progress import Progress
from nemo_sspo.training.recorder import RunRecorder
from nemo_sspo.training.rollout import (
    Rollout,
    collect_rollout,
    rollout_metrics,
    rollout_samples,
    sampling_params,
)
from nemo_sspo.training.stop import StopRequest
from nemo_sspo.training.validation import validate

QUANTILES = (0.01, 0.10, 0.50, 0.90, 0.99)


@dataclass
class Trainer:
    """One run of a config, from `position` to its end or to a stop request."""

    config: RunConfig
    actor: Actor
    engine: GenerationEngine
    tokenizer: Tokenizer
    datasets: Datasets
    groups: ProcessGroupCollection
    run_dir: Path
    stop: StopRequest
    recorder: RunRecorder | None  # on rank 0 only

    def __post_init__(self) -> None:
        grpo = self.config.model.grpo
        self.objective = build_objective(vars(grpo.objective))
        self.sampling = sampling_params(self.tokenizer, grpo.length_params.max_length, grpo.sampling_params.temperature)
        self.position = Position()
        self._clock = time.monotonic()

    # -- stages ---------------------------------------------------------------------------------------------------

    def fit(self, checkpoint: Checkpoint | None = None) -> bool:
        """Train from `checkpoint` (None: from the start). True: to the end; False: stopped on a signal, and saved."""
        resumed_stage = None
        if checkpoint is not None:
            load_model(checkpoint, self.actor.module, shape_fields(self.config.model))
            self.position, resumed_stage = checkpoint.position, checkpoint.stage
        if self.recorder is not None:
            p = self.position
            self.recorder.resume(p.rollout, p.step, p.cold_start_step)
        self._clock = time.monotonic() - self.position.seconds
        if resumed_stage != "grpo" and not self._cold_start(checkpoint):
            return False
        return self._grpo(checkpoint if resumed_stage == "grpo" else None)

    def _cold_start(self, checkpoint: Checkpoint | None) -> bool:
        total, options = self.config.trainer.sft.max_steps, self.config.model.sft
        self.actor.set_optimizer(options.optim, self.config.trainer.sft.gradient_clip_val, max(total, 1))
        self._restore_optimizer(checkpoint, self.position.cold_start_step)
        with Progress("cold_start", total, self.position.cold_start_step) as progress:
            while self.position.cold_start_step < total:
                started = time.monotonic()
                step = self.position.cold_start_step
                result = self._supervised_step(step)
                record = _step_record(step + 1, result) | {"time/step": time.monotonic() - started}
                self.position = replace(self.position, cold_start_step=step + 1)
                if self.recorder is not None:
                    self.recorder.cold_start(record)
                progress.update(record)
                stopping = self.stop.agreed(self.groups.dp_cp)
                if stopping or (step + 1) % self.config.trainer.sft.save_interval == 0:
                    self._save("cold_start")
                if stopping:
                    return False
        return True

    def _grpo(self, checkpoint: Checkpoint | None) -> bool:
        grpo = self.config.trainer.grpo
        optimizer_steps = max(grpo.max_steps * grpo.optimizer_steps_per_rollout, 1)
        self.actor.set_optimizer(self.config.model.optim, grpo.gradient_clip_val, optimizer_steps)
        self._restore_optimizer(checkpoint, self.position.step)
        with Progress("grpo", grpo.max_steps, self.position.rollout) as progress:
            if self.position.rollout == 0:
                self._validate("test", progress)
                if grpo.run_validation_step_0:
                    self._validate("validation", progress)
                self._save("grpo")
            while self.position.rollout < grpo.max_steps:
                self._grpo_step(progress)
                done = self.position.rollout
                last = done == grpo.max_steps
                if last or (grpo.val_check_interval and done % grpo.val_check_interval == 0):
                    self._validate("validation", progress)
                if last:
                    self._validate("test", progress)
                stopping = self.stop.agreed(self.groups.dp_cp)
                if last or stopping or done % grpo.save_interval == 0:
                    self._save("grpo")
                if stopping and not last:
                    return False
        return True

    # -- steps ----------------------------------------------------------------------------------------------------

    def _grpo_step(self, progress: Progress) -> None:
        """One rollout and the optimizer steps on it. The policy goes stale from the second one on."""
        grpo, model, step = self.config.trainer.grpo, self.config.model, self.position.rollout
        started = time.monotonic()
        rows = prompt_indices(
            model.seed, step, grpo.num_prompts_per_grpo_step, len(self.datasets.train), model.data.shuffle_train_data
        )
        self.engine.refit(self.actor.module.named_parameters())
        rollout = collect_rollout(
            self.actor,
            self.engine,
            [self.datasets.train[i] for i in rows.tolist()],
            self.tokenizer,
            self.sampling,
            samples_per_prompt=grpo.samples_per_prompt,
            advantages=self.objective.advantages,
            forward_micro_batch_size=model.grpo.forward_micro_batch_size,
            seed=model.seed,
            step=step,
            groups=self.groups,
        )
        shared = rollout_metrics(rollout, grpo.samples_per_prompt) | {"time/rollout": time.monotonic() - started}
        if self.recorder is not None:
            self.recorder.samples(rollout_samples(rollout, step + 1, grpo.num_logged_samples))
        generator = torch.Generator().manual_seed(sample_seed(model.seed, "mini-batches", step))
        for rows in torch.randperm(len(rollout), generator=generator).split(model.global_batch_size):
            started = time.monotonic()
            batch = rollout.select(rows)
            result = self.actor.step(batch, self._policy_loss(batch), self.sampling.temperature)
            self.position = replace(self.position, step=self.position.step + 1)
            record = {"step": self.position.step, "rollout": step + 1} | _step_record(self.position.step, result)
            record |= shared | self._policy_metrics(batch, result) | {"time/train": time.monotonic() - started}
            if self.recorder is not None:
                self.recorder.metrics(record)
            progress.update(record, advance=0)
        self.position = replace(self.position, rollout=step + 1)
        progress.update({})

    def _supervised_step(self, step: int) -> StepResult:
        """One optimizer step on worked examples; the loss is the mean over the global batch's response tokens."""
        model, examples = self.config.model, self.datasets.sft
        rows = prompt_indices(sample_seed(model.seed, "sft"), step, model.sft.global_batch_size, len(examples), True)
        batch = supervised_batch([examples[i] for i in rows.tolist()], self.tokenizer.pad_id)
        count = batch.num_tokens
        return self.actor.step(batch, lambda piece, logprobs, entropy: -(logprobs * piece.mask).sum() / count)

    def _policy_loss(self, batch: Rollout) -> Callable[[Rollout, Tensor, Tensor], Tensor]:
        """The objective of one optimizer step, with the counts of its global batch as denominators."""
        responses, tokens = len(batch), batch.num_tokens

        def loss(piece: Rollout, logprobs: Tensor, entropy: Tensor) -> Tensor:
            return self.objective(
                logprobs,
                piece.old_logprobs,
                piece.advantages,
                piece.mask,
                num_responses=responses,
                num_tokens=tokens,
                rollout_logprobs=piece.rollout_logprobs,
                entropy=entropy,
            ).loss

        return loss

    def _policy_metrics(self, batch: Rollout, result: StepResult) -> dict:
        """The objective's metrics over the global batch, however it was cut, and what its ratios looked like."""
        output = self.objective(
            result.policy_logprobs,
            batch.old_logprobs,
            batch.advantages,
            batch.mask,
            rollout_logprobs=batch.rollout_logprobs,
            entropy=result.entropy,
        )
        log_ratio = (result.policy_logprobs - batch.old_logprobs)[batch.mask.bool()]
        stride = 1 + log_ratio.numel() // 2**24  # torch.quantile takes 2**24 values
        return {k: float(v) for k, v in output.metrics.items()} | {
            "log_ratio/quantiles": torch.quantile(log_ratio[::stride], torch.tensor(QUANTILES)).tolist(),
            "log_ratio/histogram": log_ratio_histogram(log_ratio),
        }

    # -- around the steps -----------------------------------------------------------------------------------------

    def _validate(self, split: str, progress: Progress) -> None:
        problems = getattr(self.datasets, split)
        if split == "validation":
            problems = problems[: self.config.trainer.grpo.val_num_prompts_per_grpo_step]
        seed = self.config.model.seed
        result = validate(self.engine, problems, self.tokenizer, self.sampling, self.groups.dp_cp, seed)
        record = {"rollout": self.position.rollout, "step": self.position.step, "split": split} | result
        if self.recorder is not None:
            self.recorder.validation(record)
        progress.update(record, advance=0)

    def _save(self, stage: str) -> None:
        self.position = replace(self.position, seconds=time.monotonic() - self._clock)
        if self.recorder is not None:
            save_checkpoint(
                self.run_dir / "checkpoints",
                self.position,
                stage,
                shape_fields(self.config.model),
                self.actor.module,
                self.actor.optimizer.state_dict(),
                keep=self.config.exp_manager.checkpoint_callback_params.save_top_k,
            )
        torch.distributed.barrier(self.groups.dp_cp)

    def _restore_optimizer(self, checkpoint: Checkpoint | None, steps: int) -> None:
        if checkpoint is not None and steps:
            self.actor.optimizer.load_state_dict(load_optimizer_state(checkpoint))
            self.actor.scheduler.step(increment=steps)


def _step_record(step: int, result: StepResult) -> dict:
    return {"step": step, "loss/mean": result.loss, "grad_norm": result.grad_norm, "lr": result.learning_rate}
