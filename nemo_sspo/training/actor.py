"""The actor: the policy with its optimizer, driven through Megatron-Core's schedule, DDP and optimizer.

Denominators are global counts that are passed in: Megatron averages losses over micro-batches and gradients over
data-parallel ranks, so a loss that is already divided by the global count is multiplied back by both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from nemo_sspo.compat import megatron_cpu
from nemo_sspo.config.schema import OptimizerConfig
from nemo_sspo.data.responses import ResponseBatch, pad_tokens, response_rows, response_targets
from nemo_sspo.model import Policy, final_hidden_states, output_weight, sequence_multiple
from nemo_sspo.parallel import linear_logprobs
from nemo_sspo.parallel.reductions import all_gather_rows, all_reduce, local_share
from nemo_sspo.routing import RoutingReplay, RoutingStats
from nemo_sspo.routing.hook import Action
from nemo_sspo.routing.slots import Slots

# (this rank's micro-batch, policy log-probs [b,T], entropy [b,T]) -> this micro-batch's share of the global loss
LossFunction = Callable[[Any, Tensor, Tensor], Tensor]

_DECAY_STYLES = {"CosineAnnealing": "cosine", "Linear": "linear", "Constant": "constant"}


@dataclass(frozen=True)
class StepResult:
    """One optimizer step on a global batch of B rows, the same on every rank."""

    loss: float
    grad_norm: float  # over all ranks, before clipping
    learning_rate: float
    policy_logprobs: Tensor  # [B, T], detached, from before the step
    entropy: Tensor  # [B, T], detached
    routing: RoutingStats | None = None  # where routes were replayed

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm were finite. Where not, the step was skipped: the weights are unchanged."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


class Actor:
    """The policy on this rank.

    `temperature` divides the logits: give the one that responses are sampled at. Log-probabilities are those of the
    full output distribution; an engine that never samples padding has them higher by -log(1 - p(padding)).
    With `distributed_optimizer` each data-parallel rank holds a part of the optimizer's state (ZeRO-1). With `routing`
    the hooks of routing replay, every pass over a batch that has routes replays them.
    """

    def __init__(
        self,
        policy: Policy,
        micro_batch_size: int,
        distributed_optimizer: bool = False,
        routing: RoutingReplay | None = None,
    ) -> None:
        megatron_cpu.install()
        self.policy = policy
        self.routing = routing
        self.groups = policy.groups
        self.micro_batch_size = micro_batch_size
        self.config = policy.config
        self.config.finalize_model_grads_func = finalize_model_grads
        self._ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=distributed_optimizer
        )
        self.chunks = [
            DistributedDataParallel(self.config, self._ddp_config, chunk, pg_collection=self.groups)
            for chunk in policy.chunks
        ]
        for chunk in self.chunks:
            chunk.broadcast_params()
        self._reference: list[Tensor] | None = None

    @property
    def device(self) -> torch.device:
        """Where the weights are. Batches come from the CPU, and results go back there."""
        return self.policy.device

    def set_optimizer(self, options: OptimizerConfig, clip_grad: float, total_steps: int) -> None:
        """A fresh optimizer and learning-rate schedule for a stage of `total_steps` optimizer steps."""
        config = MegatronOptimizerConfig(
            optimizer="adam",  # the name says how its state is held
            lr=options.lr,
            min_lr=options.sched.min_lr,
            weight_decay=options.weight_decay,
            adam_beta1=options.betas[0],
            adam_beta2=options.betas[1],
            adam_eps=options.eps,
            clip_grad=clip_grad,
            bf16=self.config.bf16,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=self._ddp_config.use_distributed_optimizer,
        )
        self.optimizer = get_megatron_optimizer(
            config,
            self.chunks,  # type: ignore[arg-type]
            use_gloo_process_groups=False,
            pg_collection=self.groups,
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

    @contextmanager
    def optimizer_state_in_host_memory(self) -> Iterator[None]:
        """Within it Adam's moments wait in host memory, and the GPU has their room. On a CPU there is nothing to do."""
        device = self.device
        if device.type == "cpu":
            yield
            return
        self._move_optimizer_state(torch.device("cpu"))
        torch.cuda.empty_cache()
        try:
            yield
        finally:
            self._move_optimizer_state(device)

    def _move_optimizer_state(self, device: torch.device) -> None:
        chained = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        for states in (part.optimizer.state.values() for part in chained):
            for state in states:
                moved = {k: v.to(device) for k, v in state.items() if isinstance(v, Tensor) and v.dim()}
                state.update(moved)

    # -- the reference policy -------------------------------------------------------------------------------------

    def keep_reference(self) -> None:
        """Take the present weights, copied to host memory, as the reference that a divergence is measured from."""
        self._reference = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]

    @property
    def has_reference(self) -> bool:
        """Whether `keep_reference` was called."""
        return self._reference is not None

    @contextmanager
    def reference(self) -> Iterator[None]:
        """Within it the weights are the reference's: one set on the device, the other in host memory."""
        if self._reference is None:
            raise RuntimeError("keep_reference was not called")
        policy = [parameter.detach().to("cpu", copy=True) for parameter in self._parameters()]
        try:
            self._put(self._reference)
            yield
        finally:
            self._put(policy)

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for chunk in self.chunks:
            yield from chunk.parameters()

    def _put(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self._parameters(), weights, strict=True):
            parameter.data.copy_(weight)

    # -- passes ---------------------------------------------------------------------------------------------------

    def logprobs(self, batch: ResponseBatch, micro_batch_size: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of the responses in a *local* batch, ``[b, T]`` each, without gradient.

        A collective: every data-parallel rank has equally many rows.
        """
        logprobs, entropy, _ = self._forward(batch, micro_batch_size, temperature, self._replay(batch))
        return logprobs, entropy

    def record_routes(
        self, batch: ResponseBatch, micro_batch_size: int, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """What `logprobs` gives, and the routes that were taken for it, ``[tokens, L, K]`` in storage for each row."""
        logprobs, entropy, routes = self._forward(batch, micro_batch_size, temperature, Action.RECORD)
        return logprobs, entropy, routes

    def _forward(
        self, batch: ResponseBatch, micro_batch_size: int, temperature: float, action: Action
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        if not len(batch):
            return torch.zeros(0, 0), torch.zeros(0, 0), []

        def outputs(piece: ResponseBatch, hidden: Tensor, non_loss_data: bool = True) -> tuple[Tensor, Tensor]:
            return self._response_logprobs(hidden, piece, temperature)

        training = [chunk.training for chunk in self.chunks]
        self._train(False)
        routes: list[Tensor] = []
        with torch.no_grad(), self._routing_pass(action) as routing:
            parts = self._schedule(batch, micro_batch_size, outputs, forward_only=True)
            if routing is not None and action is Action.RECORD:
                routes = routing.routes()
            elif routing is not None:
                routing.stats()  # every router replayed
        for chunk, was_training in zip(self.chunks, training, strict=True):
            chunk.train(was_training)
        logprobs, entropy = self._from_last_stage(parts, batch)
        return logprobs.cpu(), entropy.cpu(), routes

    def _replay(self, batch: ResponseBatch) -> Action:
        return Action.NONE if batch.routes is None else Action.REPLAY

    @contextmanager
    def _routing_pass(self, action: Action, training: bool = False) -> Iterator[RoutingReplay | None]:
        """Within it the routers replay or record; None where they do neither."""
        if action is Action.NONE:
            yield None
            return
        if self.routing is None:
            raise RuntimeError("this actor was built without routing replay, but the batch has routes, or wants them")
        with self.routing.taking_part(action, training):
            yield self.routing

    def step(self, batch: ResponseBatch, loss_function: LossFunction, temperature: float = 1.0) -> StepResult:
        """One optimizer step on a *global* batch; each data-parallel rank takes its contiguous share of the rows.

        `loss_function` gives each micro-batch's share of the loss: its sum over rows, divided by a *global* count. A
        loss or gradient norm that is not finite leaves weights, optimizer and learning rate as they were.
        """
        dp = self.groups.dp_cp
        local = batch.select(local_share(len(batch), dp))
        pieces = -(-len(local) // self.micro_batch_size)

        def loss(piece: ResponseBatch, hidden: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
            logprobs, entropy = self._response_logprobs(hidden, piece, temperature)
            share = loss_function(piece, logprobs, entropy)
            return share * (pieces * dp.size()), (logprobs.detach(), entropy.detach(), share.detach())

        self._train(True)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        with self._routing_pass(self._replay(batch), training=True) as routing:
            parts = self._schedule(local, self.micro_batch_size, loss, forward_only=False)
            stats = None if routing is None else routing.stats()
        share = sum((p[2] for p in parts), start=torch.zeros((), device=self.device))
        total = float(all_reduce(self._broadcast_from_last_stage(share), dp))
        self.optimizer.prepare_grads()
        grad_norm = float(self.optimizer.get_grad_norm())  # one norm over all ranks, experts included
        learning_rate = self.optimizer.param_groups[0]["lr"]
        if math.isfinite(total) and math.isfinite(grad_norm):
            self.optimizer.step()
            self.scheduler.step(increment=1)
        logprobs, entropy = self._from_last_stage(parts, local)
        return StepResult(
            loss=total,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            policy_logprobs=all_gather_rows(logprobs, dp).cpu(),
            entropy=all_gather_rows(entropy, dp).cpu(),
            routing=stats,
        )

    def _train(self, mode: bool) -> None:
        for chunk in self.chunks:
            chunk.train(mode)

    def _response_logprobs(self, hidden: Tensor, piece: ResponseBatch, temperature: float) -> tuple[Tensor, Tensor]:
        """Log-probability and entropy of each response token, ``[b, T]`` each, 0 on padding, from ``[S, >= b, H]``.

        Only the rows that predict a response token meet the output layer.
        """
        mask = piece.mask.bool()
        rows = response_rows(hidden[:, : len(piece)].transpose(0, 1), piece)[mask]
        targets = response_targets(piece)[mask]
        weight = output_weight(self.policy.chunks[-1])
        values = linear_logprobs(
            rows, weight, targets, self.groups.tp, temperature=temperature, vocab_size=self.policy.vocab_size
        )
        logprobs, entropy = (value.new_zeros(mask.shape).masked_scatter(mask, value) for value in values)
        return logprobs, entropy

    def _schedule(self, batch: ResponseBatch, micro_batch_size: int, function: Callable, forward_only: bool) -> list:
        """Run Megatron-Core's schedule over `batch`.

        Returns what `function` returned for each micro-batch, on the last pipeline stage; elsewhere nothing.
        """
        pieces = batch.split(micro_batch_size)
        multiple = sequence_multiple(self.config)
        # Pipeline stages expect micro-batches of one shape from each other.
        rows, columns = (micro_batch_size, batch.tokens.shape[1]) if self.groups.pp.size() > 1 else (1, 1)

        def forward_step(pieces: Any, model: torch.nn.Module) -> tuple[Tensor, Callable]:
            piece = next(pieces)
            tokens = pad_tokens(piece.tokens, rows, columns, multiple)
            if self.routing is not None and self.routing.active:
                lengths = (piece.prompt_lengths + piece.response_lengths).tolist()
                self.routing.feed(cast(Any, model).module, Slots.padded(lengths, *tokens.shape), piece.routes)
            piece, tokens = piece.to(self.device), tokens.to(self.device)
            return final_hidden_states(model, cast(Any, model).module, tokens), partial(function, piece)

        schedule = get_forward_backward_func(
            pp_size=self.groups.pp.size(), vp_size=self.config.virtual_pipeline_model_parallel_size
        )
        iterators = [iter(pieces) for _ in self.chunks]
        results: list = schedule(  # type: ignore[assignment]  (declared to return nothing)
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],  # type: ignore[arg-type]
            num_microbatches=len(pieces),
            seq_length=columns + -columns % multiple,
            micro_batch_size=micro_batch_size,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            pg_collection=self.groups,
            p2p_communicator=P2PCommunicator(self.groups.pp, self.config) if self.groups.pp.size() > 1 else None,
        )
        return results

    def _from_last_stage(self, parts: list, batch: ResponseBatch) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropy ``[b, T]`` of a local batch, on every stage, from the last stage's `parts`."""
        both = torch.zeros(2, len(batch), batch.max_response_length, device=self.device)
        start = 0
        for part in parts:
            rows, width = part[0].shape
            both[:, start : start + rows, :width] = torch.stack(part[:2])
            start += rows
        logprobs, entropy = self._broadcast_from_last_stage(both)
        return logprobs, entropy

    def _broadcast_from_last_stage(self, value: Tensor) -> Tensor:
        pp = self.groups.pp
        if pp.size() > 1:
            torch.distributed.broadcast(value, group=pp, group_src=pp.size() - 1)
        return value
