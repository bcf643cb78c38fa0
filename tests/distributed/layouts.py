"""The layouts that are proved equal to a single process, and what one run of each gives back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_sspo.config.schema import OptimizerConfig
from nemo_sspo.data.responses import ResponseBatch
from tests.tiny import VOCAB, tiny_config, uneven_batch


class Layout(NamedTuple):
    """Processes, and the keys under ``model.`` that differ from their defaults."""

    processes: int
    keys: dict[str, Any]
    distributed_optimizer: bool = False

    @property
    def overrides(self) -> list[str]:
        on_gpu = ["trainer.accelerator=gpu"] if self.keys.get("transformer_engine") else []  # where that is allowed
        return [f"model.{key}={value}" for key, value in self.keys.items()] + on_gpu


def _layout(
    processes: int, tp: int = 1, pp: int = 1, vpp: int = 0, ep: int = 1, etp: int = 1, **options: Any
) -> Layout:
    keys: dict[str, Any] = {}
    if tp > 1:
        keys |= {"tensor_model_parallel_size": tp, "sequence_parallel": "true"}
    if pp > 1:
        keys |= {"pipeline_model_parallel_size": pp}
    if vpp:
        keys |= {"virtual_pipeline_model_parallel_size": vpp}
    if ep > 1:
        keys |= {"expert_model_parallel_size": ep}
    if etp > 1:
        keys |= {"expert_tensor_parallel_size": etp}
    distributed_optimizer = options.pop("distributed_optimizer", False)
    return Layout(processes, keys | options, distributed_optimizer)


LAYOUTS = {
    "single": _layout(1),
    "dp2": _layout(2),
    "dp2_distopt": _layout(2, distributed_optimizer=True),
    "tp2_sp": _layout(2, tp=2),
    "pp2": _layout(2, pp=2),
    "pp2_vpp2": _layout(2, pp=2, vpp=2),
    "ep2": _layout(2, ep=2),
    "ep2_distopt": _layout(2, ep=2, distributed_optimizer=True),
    "ep4": _layout(4, ep=4),
    "tp2_sp_etp2": _layout(2, tp=2, etp=2),
    "ep2_etp2": _layout(4, tp=2, ep=2, etp=2),
    "tp2_ep2": _layout(2, tp=2, ep=2),
    "tp2_ep2_pp2": _layout(4, tp=2, pp=2, ep=2),
    "tp2_pp2_ep2_dp2": _layout(8, tp=2, pp=2, ep=2),
    "tp2_pp2_vpp2_ep2_dp2_distopt": _layout(8, tp=2, pp=2, vpp=2, ep=2, distributed_optimizer=True),
}

MODEL = ("model.num_layers=4", "model.encoder_seq_length=32")
# Micro-batches of 3 rows and a last one of fewer, on every number of ranks; interleaving needs an even number of them.
ROWS, MICRO_BATCH, STEPS = 22, 3, 3


def measure(rank: int, size: int, layout: Layout, extra: tuple[str, ...] = ()) -> dict[str, Any] | None:
    """Loss, norm and every gradient before and after three steps, weights, log-probs, greedy tokens; on rank 0."""
    from nemo_sspo.model import build_model
    from nemo_sspo.training.actor import Actor
    from nemo_sspo.training.distributed import model_parallel_groups

    config = tiny_config(*MODEL, *layout.overrides, *extra)
    with model_parallel_groups(config.model) as groups:
        policy = build_model(config.model, VOCAB, groups, config.trainer.precision)
        actor = Actor(policy, MICRO_BATCH, layout.distributed_optimizer)
        actor.set_optimizer(OptimizerConfig(lr=1e-3, eps=1e-5), clip_grad=0.5, total_steps=10)
        batches = [uneven_batch(rows=ROWS, seed=seed) for seed in range(STEPS + 1)]
        result: dict[str, Any] = {"loss": [], "grad_norm": [], "logprobs": [], "entropy": []}
        result["weights_before"] = gather(policy, lambda parameter: parameter.data)
        for step, batch in enumerate(batches):
            outcome = actor.step(batch, loss_of(batch), temperature=0.7)
            for name in result:
                if isinstance(result[name], list):
                    result[name].append(getattr(outcome, name if hasattr(outcome, name) else f"policy_{name}"))
            if step in (0, STEPS):
                result[f"gradients_{step}"] = gather(policy, gradients(actor))
        result["weights"] = gather(policy, lambda parameter: parameter.data)
    return result if rank == 0 else None


def loss_of(batch: ResponseBatch) -> Any:
    """A loss with every kind of gradient: of log-probabilities weighted by row, and of the entropy."""
    count = batch.num_tokens

    def loss(piece: ResponseBatch, logprobs: Tensor, entropy: Tensor) -> Tensor:
        weight = 1.0 + piece.prompt_lengths[:, None] % 3
        return -((weight * logprobs + 0.1 * entropy) * piece.mask).sum() / count

    return loss


def gradients(actor: Any) -> Any:
    """parameter -> its whole gradient; the distributed optimizer leaves each rank a part of it."""
    if actor._ddp_config.use_distributed_optimizer:
        for chunk in actor.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                group = buffer.data_parallel_group
                for bucket in buffer.buckets:
                    part = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                    dist.all_gather_into_tensor(bucket.grad_data, part, group=group)
    return lambda parameter: parameter.main_grad


def gather(policy: Any, value_of: Any) -> dict[str, Tensor]:
    """A value of every parameter, by global name and whole, from the parts that the ranks hold."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace

    def of(sharded: Any) -> Any:
        if isinstance(getattr(sharded, "data", None), torch.nn.Parameter):
            sharded.data = value_of(sharded.data)
        return sharded

    return assemble(dict_list_map_inplace(of, policy.sharded_weights()))


def assemble(sharded_state_dict: Any) -> dict[str, Tensor]:
    """The tensors of a sharded state dict, whole, on every rank."""
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    from nemo_sspo.model.weights import shards

    mine = [
        (s.key, s.global_shape, s.global_slice(), s.data.detach().clone())
        for s in shards(sharded_state_dict)
        if is_main_replica(s.replica_id) and s.data is not None
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    whole: dict[str, Tensor] = {}
    for key, shape, where, part in (item for items in everyone for item in items):
        whole.setdefault(key, torch.full(shape, torch.nan, dtype=part.dtype))[where] = part
    return whole
