"""Layouts with what they need and how long they take, best first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from nemo_sspo.config.schema import RunConfig
from nemo_sspo.plan.job import job_of
from nemo_sspo.plan.layout import Layout
from nemo_sspo.plan.memory import FREE, GIB, RESERVE, Job, Memory, layout_memory
from nemo_sspo.plan.rates import Gpu
from nemo_sspo.plan.steptime import StepTime, step_time


@dataclass(frozen=True)
class Plan:
    """One layout for a job on one kind of GPU."""

    layout: Layout
    memory: Memory
    time: StepTime
    fits: bool

    @property
    def order(self) -> tuple:
        """What fits comes first, the fastest of it at the top; of the rest what lacks least. Plainer ones win ties."""
        layout = self.layout
        plain = (layout.fp8, layout.offload, layout.recompute != "none", layout.tp, layout.pp, layout.ep)
        return (not self.fits, self.time.total if self.fits else self.memory.peak, *plain)


def rank(job: Job, layouts: Iterable[Layout], gpu: Gpu, gpu_memory: float, steps_per_rollout: int = 1) -> list[Plan]:
    """Every layout, best first, for GPUs of `gpu_memory` GiB."""
    return sorted((_plan(job, one, gpu, gpu_memory, steps_per_rollout) for one in layouts), key=lambda plan: plan.order)


def _plan(job: Job, layout: Layout, gpu: Gpu, gpu_memory: float, steps_per_rollout: int) -> Plan:
    held = layout_memory(job, layout)
    return Plan(layout, held, step_time(job, layout, held, gpu, steps_per_rollout), held.fits(gpu_memory * GIB))


def memory_warning(
    config: RunConfig, world_size: int, gpu_bytes: int, vocab_size: int | None = None, attention: str = "local"
) -> str | None:
    """One line if `config` on `world_size` GPUs of `gpu_bytes` each looks too large, None if it fits.

    For the start of a run, before the model is built. `attention`: flash for Transformer Engine's layers in bf16.
    """
    held = layout_memory(job_of(config, vocab_size, attention), Layout.of(config, world_size))
    if held.fits(gpu_bytes):
        return None
    phase = "training" if held.training >= held.generation else "generation"
    largest = sorted(_by_kind(held, phase), reverse=True)[:3]
    return (
        f"this layout needs about {(held.peak + RESERVE) / GIB:.1f} GiB a GPU in {phase}, of {gpu_bytes / GIB:.1f} GiB "
        f"with {FREE:.0%} kept free ({', '.join(f'{kind} {size / GIB:.1f}' for size, kind in largest)}); "
        "`nemo-sspo plan` lists layouts that fit"
    )


def _by_kind(held: Memory, phase: str) -> list[tuple[int, str]]:
    only = ("activations", "logits", "routes") if phase == "training" else ("kv_cache", "generation_weights")
    return [(getattr(held, kind), kind) for kind in ("weights", "gradients", "optimizer", *only)]
