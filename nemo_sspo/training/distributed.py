"""Start and end of the process group, and Megatron-Core's groups as explicit arguments."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from nemo_sspo.compat import megatron_cpu
from nemo_sspo.config.schema import ModelConfig
from nemo_sspo.training.watch import watch_peers


@contextmanager
def process_groups(model: ModelConfig, timeout_minutes: int = 30) -> Iterator[ProcessGroupCollection]:
    """The process group of the run, and Megatron-Core's groups in it for the layout in `model`.

    Over gloo on CPU and NCCL on GPU; a rank that dies or fails ends all others. Without a launcher a single process is
    a world of one, with no port and no rendezvous.
    """
    megatron_cpu.install()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    elif "OMP_NUM_THREADS" not in os.environ:
        # As under torchrun. Operators of a small model are too short to share: on a busy machine OpenMP's threads wait
        # for each other and a run takes ten times as long. OMP_NUM_THREADS decides for a larger one.
        torch.set_num_threads(1)
    timeout = timedelta(minutes=timeout_minutes)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        with watch_peers(), model_parallel_groups(model, timeout_minutes) as groups:
            yield groups
    finally:
        dist.destroy_process_group()


@contextmanager
def model_parallel_groups(model: ModelConfig, timeout_minutes: int = 30) -> Iterator[ProcessGroupCollection]:
    """Megatron-Core's groups for the layout in `model`, within the process group that there is."""
    megatron_cpu.install()
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=model.tensor_model_parallel_size,
            pipeline_model_parallel_size=model.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
            context_parallel_size=model.context_parallel_size,
            expert_model_parallel_size=model.expert_model_parallel_size,
            expert_tensor_parallel_size=model.expert_tensor_parallel_size,
            create_gloo_process_groups=False,
            distributed_timeout_minutes=timeout_minutes,
        )
        yield ProcessGroupCollection.use_mpu_process_groups()
    finally:
        parallel_state.destroy_model_parallel()
