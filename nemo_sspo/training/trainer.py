"""The loop: cold start, then GRPO steps of one rollout and several optimizer steps; validate, record, save, stop."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from nemo_sspo.checkpoint import (
    Checkpoint,
    CheckpointSaver,
    Position,
    find_whole,
    list_checkpoints,
    load_training_state,
    load_weights,
)
from nemo_sspo.checkpoint.folder import ROLLOUT
from nemo_sspo.config.resolve import shape_fields
from nemo_sspo.config.schema import CheckpointConfig, RunConfig
from nemo_sspo.data.batches import prompt_indices, supervised_batch
from nemo_sspo.data.dataset import Datasets
from nemo_sspo.data.responses import ResponseBatch
from nemo_sspo.data.tokenizer import Tokenizer
from nemo_sspo.errors import RunError, UserError
from nemo_sspo.generation import GenerationEngine
from nemo_sspo.objective import build_objective
from nemo_sspo.parallel.ranks import world
from nemo_sspo.report.histogram import log_ratio_histogram
from nemo_sspo.routing import RoutingStats
from nemo_sspo.seeds import sample_seed
from nemo_sspo.training.actor import Actor, StepResult
from nemo_sspo.training.faults import SkippedSteps
from nemo_sspo.training.notes import note
from nemo_sspo.training.progress import Progress
from nemo_sspo.training.recorder import RunRecorder
from nemo_sspo.training.rollout import (
    Rollout,
    collect_rollout,
    rollout_metrics,
    rollout_samples,
    routing_metrics,
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
        # Inputs that are not finite end in a loss that is not, which skips the step on every rank alike.
        self.objective = build_objective(vars(grpo.objective) | {"check_finite": False})
        self.sampling = sampling_params(
            self.tokenizer,
            grpo.length_params.max_length,
            grpo.sampling_params.temperature,
            self.actor.policy.vocab_size,
        )
        if grpo.routing_replay.mode == "R3" and not self.engine.returns_routes:
            raise UserError(
                f"model.grpo.routing_replay.mode: got R3, but {type(self.engine).__name__} can't tell which experts it "
                "chose; set it to R2, or choose another model.grpo.generation.backend"
            )
        self.position = Position()
        self.shape = shape_fields(self.config.model)
        self.saver = CheckpointSaver(
            self.run_dir / "checkpoints", self.config.exp_manager.checkpoint_callback_params, note
        )
        self.skipped = SkippedSteps(self.run_dir / "skipped", self.config.trainer.grpo.max_skipped_steps)
        self._clock = time.monotonic()
        self._score: float | None = None  # of the last validation, while the weights are those it measured
        self._best: float | None = None

    # -- stages ---------------------------------------------------------------------------------------------------

    def fit(self, checkpoint: Checkpoint | None = None) -> bool:
        """Train from `checkpoint` (None: from the start). True: to the end; False: stopped on a signal, and saved."""
        if checkpoint is not None:
            self.position = checkpoint.position
        if self.recorder is not None:
            p = self.position
            self.recorder.resume(p.rollout, p.step, p.cold_start_step)
        self._clock = time.monotonic() - self.position.seconds
        resumed = None if checkpoint is None else checkpoint.stage
        finished = False
        if resumed == "grpo" or self._cold_start(checkpoint):
            finished = self._grpo(checkpoint if resumed == "grpo" else None)
        self.saver.finish()
        return finished

    def _cold_start(self, checkpoint: Checkpoint | None) -> bool:
        total, options = self.config.trainer.sft.max_steps, self.config.model.sft
        self.actor.set_optimizer(options.optim, self.config.trainer.sft.gradient_clip_val, max(total, 1))
        self._restore(checkpoint)
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
                self.saver.poll()
                stopping = self._stopping()
                if stopping or (step + 1) % self.config.trainer.sft.save_interval == 0:
                    self._save("cold_start")
                if stopping:
                    return False
        return True

    def _grpo(self, checkpoint: Checkpoint | None) -> bool:
        grpo = self.config.trainer.grpo
        optimizer_steps = max(grpo.max_steps * grpo.optimizer_steps_per_rollout, 1)
        self.actor.set_optimizer(self.config.model.optim, grpo.gradient_clip_val, optimizer_steps)
        self._keep_reference(resumed=checkpoint is not None)
        self._restore(checkpoint)
        in_flight = self._rollout_in_flight(checkpoint)
        with Progress("grpo", grpo.max_steps, self.position.rollout) as progress:
            if self.position.rollout == 0 and in_flight is None:
                self._validate("test", progress)
                if grpo.run_validation_step_0:
                    self._validate("validation", progress)
                self._save("grpo")
            while self.position.rollout < grpo.max_steps:
                if not self._grpo_step(progress, in_flight):
                    return False
                in_flight = None
                done = self.position.rollout
                last = done == grpo.max_steps
                validated = last or (grpo.val_check_interval and done % grpo.val_check_interval == 0)
                improved = self._validate("validation", progress) if validated else False
                if last:
                    self._validate("test", progress)
                self.saver.poll()
                stopping = self._stopping()
                if last or stopping or improved or done % grpo.save_interval == 0:
                    self._save("grpo")
                if stopping and not last:
                    return False
        return True

    # -- steps ----------------------------------------------------------------------------------------------------

    def _grpo_step(self, progress: Progress, in_flight: tuple[Rollout, float] | None) -> bool:
        """One rollout and the optimizer steps on it. The policy goes stale from the second one on.

        `in_flight` is a rollout that a checkpoint held, with the seconds that it took. False: stopped on a signal in
        between, and saved.
        """
        model, step = self.config.model, self.position.rollout
        rollout, seconds = in_flight or self._rollout(step)
        metrics = rollout_metrics(rollout, self.config.trainer.grpo.samples_per_prompt) | {"time/rollout": seconds}
        if self.actor.routing is not None:
            metrics |= routing_metrics(rollout, self.actor.routing.form)
        if self.recorder is not None:
            self.recorder.samples(rollout_samples(rollout, step + 1, self.config.trainer.grpo.num_logged_samples))
        generator = torch.Generator().manual_seed(sample_seed(model.seed, "mini-batches", step))
        mini_batches = torch.randperm(len(rollout), generator=generator).split(model.global_batch_size)
        for done in range(self.position.mini_batch, len(mini_batches)):
            if self._stopping():
                self._save("grpo", rollout, seconds)
                return False
            self._score = None
            started = time.monotonic()
            batch = rollout.select(mini_batches[done])
            if batch.routes is None and model.grpo.routing_replay.mode != "none":
                raise RunError("model.grpo.routing_replay: the rollout has lost its routes between engine and actor")
            result = self.actor.step(batch, self._policy_loss(batch), self.sampling.temperature)
            self.position = replace(self.position, step=self.position.step + 1, mini_batch=done + 1)
            self._count_skipped(result, batch, f"step_{self.position.step:06d}")
            record = {"step": self.position.step, "rollout": step + 1} | _step_record(self.position.step, result)
            record |= metrics | (self._policy_metrics(batch, result) if result.finite else {})
            record |= {} if result.routing is None else _routing_record(result.routing)
            record |= {"skipped_steps": self.position.skipped, "time/train": time.monotonic() - started}
            if self.recorder is not None:
                self.recorder.metrics(record)
            progress.update(record, advance=0)
        self.position = replace(self.position, rollout=step + 1, mini_batch=0)
        progress.update({})
        return True

    def _rollout(self, step: int) -> tuple[Rollout, float]:
        """The responses of one GRPO step by the present policy, and the seconds that they took."""
        grpo, model = self.config.trainer.grpo, self.config.model
        started = time.monotonic()
        rows = prompt_indices(
            model.seed, step, grpo.num_prompts_per_grpo_step, len(self.datasets.train), model.data.shuffle_train_data
        )
        idle = self.actor.optimizer_state_in_host_memory() if model.grpo.offload_adam_states else nullcontext()
        with idle:
            self.engine.refit((name, p) for chunk in self.actor.policy.chunks for name, p in chunk.named_parameters())
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
                routing_replay=model.grpo.routing_replay.mode,
            )
        return rollout, time.monotonic() - started

    def _supervised_step(self, step: int) -> StepResult:
        """One optimizer step on worked examples; the loss is the mean over the global batch's response tokens."""
        model, examples = self.config.model, self.datasets.sft
        rows = prompt_indices(sample_seed(model.seed, "sft"), step, model.sft.global_batch_size, len(examples), True)
        batch = supervised_batch([examples[i] for i in rows.tolist()], self.tokenizer.pad_id)
        count = batch.num_tokens
        result = self.actor.step(batch, lambda piece, logprobs, entropy: -(logprobs * piece.mask).sum() / count)
        self._count_skipped(result, batch, f"cold_start_{step + 1:06d}")
        return result

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
                reference_logprobs=piece.reference_logprobs,
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
            reference_logprobs=batch.reference_logprobs,
            entropy=result.entropy,
        )
        log_ratio = (result.policy_logprobs - batch.old_logprobs)[batch.mask.bool()]
        stride = 1 + log_ratio.numel() // 2**24  # torch.quantile takes 2**24 values
        return {k: float(v) for k, v in output.metrics.items()} | {
            "log_ratio/quantiles": torch.quantile(log_ratio[::stride], torch.tensor(QUANTILES)).tolist(),
            "log_ratio/histogram": log_ratio_histogram(log_ratio),
        }

    # -- around the steps -----------------------------------------------------------------------------------------

    def _validate(self, split: str, progress: Progress) -> bool:
        """Measure and record; whether the validation split's ``monitor`` is the best of this session so far."""
        problems = getattr(self.datasets, split)
        if split == "validation":
            problems = problems[: self.config.trainer.grpo.val_num_prompts_per_grpo_step]
        seed = self.config.model.seed
        result = validate(self.engine, problems, self.tokenizer, self.sampling, self.groups.dp_cp, seed)
        record = {"rollout": self.position.rollout, "step": self.position.step, "split": split} | result
        if self.recorder is not None:
            self.recorder.validation(record)
        progress.update(record, advance=0)
        options = self.config.exp_manager.checkpoint_callback_params
        if split != "validation" or options.monitor is None:
            return False
        self._score = result[options.monitor]
        better = self._score is not None and (
            self._best is None or (self._score > self._best if options.mode == "max" else self._score < self._best)
        )
        if better:
            self._best = self._score
        return better

    def _stopping(self) -> bool:
        return self.stop.agreed(world())

    def _count_skipped(self, result: StepResult, batch: ResponseBatch, name: str) -> None:
        p = self.position
        self.position = replace(
            p,
            skipped=p.skipped + (not result.finite),
            skipped_in_row=0 if result.finite else p.skipped_in_row + 1,
        )
        if not result.finite:
            self.skipped.record(name, result, batch, self.position.skipped_in_row)

    def _save(self, stage: str, rollout: Rollout | None = None, seconds: float = 0.0) -> None:
        self.position = replace(self.position, seconds=time.monotonic() - self._clock)
        checkpoint = Checkpoint(
            path=self.run_dir / "checkpoints",
            position=self.position,
            stage=stage,
            shape=self.shape,
            optimizer_steps=self.actor.scheduler.num_steps,
            score=self._score,
            in_flight=rollout is not None,
        )
        in_flight = None if rollout is None else {"rollout": vars(rollout), "seconds": seconds}
        self.saver.save(checkpoint, self.actor.policy, self.actor.optimizer, in_flight)

    def _restore(self, checkpoint: Checkpoint | None) -> None:
        """Weights, optimizer and learning rate of a checkpoint of this stage."""
        if checkpoint is None:
            return
        steps = checkpoint.optimizer_steps
        if steps:
            load_training_state(checkpoint, self.actor.policy, self.actor.optimizer, self.shape)
            self.actor.scheduler.step(increment=steps)
        else:
            load_weights(checkpoint, self.actor.policy, self.shape)
            self.actor.optimizer.reload_model_params()
        scores = [c.score for c in list_checkpoints(self.run_dir / "checkpoints") if c.order <= checkpoint.order]
        known = [score for score in scores if score is not None]
        mode = self.config.exp_manager.checkpoint_callback_params.mode
        self._best = (max if mode == "max" else min)(known) if known else None

    def _rollout_in_flight(self, checkpoint: Checkpoint | None) -> tuple[Rollout, float] | None:
        if checkpoint is None or not checkpoint.in_flight:
            return None
        saved = torch.load(checkpoint.path / ROLLOUT, weights_only=True)
        return Rollout(**saved["rollout"]), saved["seconds"]

    def _keep_reference(self, resumed: bool) -> None:
        """With a divergence in the loss: the policy as it enters GRPO stays the reference, in a folder of its own."""
        if not self.config.model.grpo.objective.kl_coeff:
            return
        folder = self.run_dir / "reference"
        if resumed:
            found = find_whole(folder)
            if found is None:
                raise UserError(f"{folder}: the reference policy of this run is gone; restore it, or start a run anew")
            load_weights(found, self.actor.policy, self.shape)
        else:
            options = CheckpointConfig(on_error="stop", monitor=None)
            checkpoint = Checkpoint(folder, self.position, "grpo", self.shape, optimizer_steps=0)
            CheckpointSaver(folder, options, note).save(checkpoint, self.actor.policy, None, None)
        self.actor.keep_reference()


def _routing_record(stats: RoutingStats) -> dict:
    return {
        "routing/replayed_fraction": stats.replayed_fraction,
        "routing/mismatch_rate": stats.mismatch_rate,
        "routing/mismatch_by_layer": stats.mismatch_by_layer,
    }


def _step_record(step: int, result: StepResult) -> dict:
    return {"step": step, "loss/mean": result.loss, "grad_norm": result.grad_norm, "lr": result.learning_rate}
