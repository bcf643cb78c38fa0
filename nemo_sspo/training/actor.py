"""The actor: the policy with its optimizer, driven through Megatron-Core's schedule, DDP and optimizer.

Denominators are global counts that are passed in: Megatron averages losses over micro-batches and gradients over
data-parallel ranks, so a loss that is already divided by the global count is multiplied back by both.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor

from nemo_sspo.compat import megatron_cpu
from nemo_sspo.config.schema import OptimizerConfig
from nemo_sspo.data.responses import ResponseBatch, response_rows, response_targets
from nemo_sspo.model import final_hidden_states, output_weight
from nemo_sspo.parallel import linear_logprobs
from nemo_sspo.parallel.reductions import all_gather_rows, all_reduce, local_share

# (this rank's micro-batch, policy log-probs [b,T], entropy [b,T]) -> this micro-batch's share of the global loss
LossFunction = Callable[[Any, Tensor, Tensor], Tensor]

_DECAY_STYLES = {"CosineAnnealing": "cosine", "Linear": "linear", "Constant": "constant"}


@dataclass(frozen=True)
class StepResult:
    """One optimizer step on a global batch of B rows, the same on every rank."""

    loss: float
    grad_norm: float
    learning_rate: float
    policy_logprobs: Tensor  # [B, T], detached, from before the step
    entropy: Tensor  # [B, T], detached


class Actor:
    """The policy on this rank.

    `temperature` divides the logits: give the one that responses are sampled at. Log-probabilities are those of the
    full output distribution; an engine that never samples padding has them higher by -log(1 - p(padding)).
    """

    def __init__(self, model: GPTModel, groups: ProcessGroupCollection, micro_batch_size: int) -> None:
        megatron_cpu.install()
        self.groups = groups
        self.micro_batch_size = micro_batch_size
        self.config = model.config
        self.config.finalize_model_grads_func = finalize_model_grads
        ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, use_distributed_optimizer=False)
        self.model = DistributedDataParallel(self.config, ddp_config, model, pg_collection=groups)
        self.model.broadcast_params()

    @property
    def device(self) -> torch.device:
        """Where the weights are. Batches come from the CPU, and results go back there."""
        return next(self.model.parameters()).device

    @property
    def module(self) -> GPTModel:
        """The bare Megatron-Core model."""
        return cast(GPTModel, self.model.module)

    def set_optimizer(self, options: OptimizerConfig, clip_grad: float, total_steps: int) -> None:
        """A fresh optimizer and learning-rate schedule for a stage of `total_steps` optimizer steps."""
        config = MegatronOptimizerConfig(
            optimizer=options.name,
            lr=options.lr,
            min_lr=options.sched.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            clip_grad=clip_grad,
            bf16=self.config.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=False,
        )
        self.optimizer = get_megatron_optimizer(
            config, [self.model], use_gloo_process_groups=False, pg_collection=self.groups
        )
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=options.lr / (options.sched.warmup_steps + 1),  # the first step learns, too
            max_lr=options.lr,
            min_lr=options.sched.min_lr,
            lr_warmup_steps=options.sched.warmup_steps,
            lr_decay_steps=max(total_steps, options.sched.warmup_steps + 1),
            lr_decay_style=_DECAY_STYLES[options.sched.name],
            start_wd=options.weight_decay,
            end_wd=options.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )

    def logprobs(self, batch: ResponseBatch, micro_batch_size: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the responses in a *local* batch, ``[b, T]`` each, without gradient."""
        if not len(batch):
            return torch.zeros(0, 0), torch.zeros(0, 0)

        def outputs(piece: ResponseBatch, hidden: Tensor, non_loss_data: bool = True) -> tuple[Tensor, Tensor]:
            return self._response_logprobs(hidden, piece, temperature)

        was_training = self.model.training
        self.model.eval()
        with torch.no_grad():
            parts = self._schedule(batch, micro_batch_size, outputs, forward_only=True)
        self.model.train(was_training)
        return _stack_rows([p[0] for p in parts]).cpu(), _stack_rows([p[1] for p in parts]).cpu()

    def step(self, batch: ResponseBatch, loss_function: LossFunction, temperature: float = 1.0) -> StepResult:
        """One optimizer step on a *global* batch; each data-parallel rank takes its contiguous share of the rows.

        `loss_function` gives each micro-batch's share of the loss: its sum over rows, divided by a *global* count.

        Raises:
            FloatingPointError: the loss or the gradient's norm is not finite (the weights are as they were).
        """
        dp = self.groups.dp_cp
        local = batch.select(local_share(len(batch), dp))
        pieces = -(-len(local) // self.micro_batch_size)

        def loss(piece: ResponseBatch, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
            logprobs, entropy = self._response_logprobs(hidden, piece, temperature)
            share = loss_function(piece, logprobs, entropy)
            return share * (pieces * dp.size()), (share.detach(), logprobs.detach(), entropy.detach())

        self.model.train()
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        parts = self._schedule(local, self.micro_batch_size, loss, forward_only=False)
        total = float(all_reduce(torch.stack([p[0] for p in parts]).sum(), dp))
        if not math.isfinite(total):
            raise FloatingPointError(f"the loss of this step is {total}; the weights are unchanged")
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())  # one norm over all ranks, the same on each
        if not math.isfinite(grad_norm):
            raise FloatingPointError(f"the gradient's norm in this step is {grad_norm}; the weights are unchanged")
        learning_rate = self.optimizer.param_groups[0]["lr"]
        self.optimizer.step()
        self.scheduler.step(increment=1)
        return StepResult(
            loss=total,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            policy_logprobs=all_gather_rows(_stack_rows([p[1] for p in parts]), dp).cpu(),
            entropy=all_gather_rows(_stack_rows([p[2] for p in parts]), dp).cpu(),
        )

    def _response_logprobs(self, hidden: Tensor, piece: ResponseBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token, ``[b, T]`` each, 0 on padding, from ``[S, b, H]``.

        Only the rows that predict a response token meet the output layer.
        """
        mask = piece.mask.bool()
        rows = response_rows(hidden.transpose(0, 1), piece)[mask]
        targets = response_targets(piece)[mask]
        weight = output_weight(self.module)
        values = linear_logprobs(rows, weight, targets, self.groups.tp, temperature=temperature)
        logprobs, entropy = (value.new_zeros(mask.shape).masked_scatter(mask, value) for value in values)
        return logprobs, entropy

    def _schedule(self, batch: ResponseBatch, micro_batch_size: int, function: Callable, forward_only: bool) -> list:
        """Run Megatron-Core's schedule over `batch`; returns what `function` returned for each micro-batch."""
        pieces = batch.split(micro_batch_size)

        def forward_step(pieces: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
            piece = next(pieces).to(self.device)
            return final_hidden_states(model, self.module, piece.tokens), partial(function, piece)

        schedule = get_forward_backward_func(pp_size=self.groups.pp.size(), vp_size=None)
        results: list = schedule(  # type: ignore[assignment]  (declared to return nothing)
            forward_step_func=forward_step,
            data_iterator=iter(pieces),
            model=[self.model],
            num_microbatches=len(pieces),
            seq_length=batch.tokens.shape[1],
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=self.groups,
        )
        return results


def _stack_rows(parts: list[Tensor]) -> Tensor:
    """Concatenate ``[b_i, T_i]`` along rows, padded with zeros to the longest T."""
    width = max(p.shape[1] for p in parts)
    return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in parts])
