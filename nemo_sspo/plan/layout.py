"""A layout as the planner sees it: how many ranks split what, and the options that memory and time depend on."""

from __future__ import annotations

import copy
import dataclasses
from dataclasses import dataclass

from nemo_sspo.config.schema import RunConfig


@dataclass(frozen=True)
class Layout:
    """`gpus` ranks. W = tp x pp x cp x dp for attention, embedding and output, W = etp x ep x pp x expert_dp else."""

    gpus: int = 1
    tp: int = 1
    ep: int = 1
    pp: int = 1
    cp: int = 1
    etp: int = 1
    vpp: int = 1  # model chunks on a stage
    micro_batch: int = 1  # responses
    recompute: str = "none"  # none | selective (core attention) | full (all layers, or the first so many with block)
    recompute_method: str = "uniform"  # uniform | block, with full
    recompute_layers: int = 1  # with full: layers to a block, or layers done so
    fp8: bool = False
    offload: bool = False  # Adam's moments wait in host memory during generation
    distributed_optimizer: bool = True

    @classmethod
    def of(cls, config: RunConfig, world_size: int) -> Layout:
        """The layout that `config` asks for on `world_size` ranks."""
        model = config.model
        return cls(
            gpus=world_size,
            tp=model.tensor_model_parallel_size,
            ep=model.expert_model_parallel_size,
            pp=model.pipeline_model_parallel_size,
            cp=model.context_parallel_size,
            etp=model.expert_tensor_parallel_size if model.num_moe_experts else model.tensor_model_parallel_size,
            vpp=model.virtual_pipeline_model_parallel_size or 1,
            micro_batch=model.micro_batch_size,
            recompute=model.activations_checkpoint_granularity or "none",
            recompute_method=model.activations_checkpoint_method or "uniform",
            recompute_layers=model.activations_checkpoint_num_layers or 1,
            offload=model.grpo.offload_adam_states,
            distributed_optimizer=model.optim.name == "mcore_distributed_optim",
        )

    def config(self, base: RunConfig) -> RunConfig:
        """`base` laid out so. FP8 has no key in it."""
        config = dataclasses.replace(base, model=copy.copy(base.model))
        model = config.model
        model.tensor_model_parallel_size, model.sequence_parallel = self.tp, self.tp > 1
        model.expert_model_parallel_size = self.ep
        model.expert_tensor_parallel_size = self.etp if model.num_moe_experts else 1
        model.pipeline_model_parallel_size = self.pp
        model.virtual_pipeline_model_parallel_size = self.vpp if self.vpp > 1 else None
        model.context_parallel_size = self.cp
        model.micro_batch_size = self.micro_batch
        full = self.recompute == "full"
        model.activations_checkpoint_granularity = None if self.recompute == "none" else self.recompute
        model.activations_checkpoint_method = self.recompute_method if full else None
        model.activations_checkpoint_num_layers = self.recompute_layers if full else None
        return config

    @property
    def dp(self) -> int:
        """Ranks that take a share of each batch."""
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Ranks with a copy of the same experts."""
        return self.gpus // (self.etp * self.ep * self.pp)
