"""The layouts that a number of GPUs can have: those that the start of a run accepts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nemo_sspo.config.layout import layout_complaints
from nemo_sspo.config.schema import RunConfig
from nemo_sspo.plan.layout import Layout

MICRO_BATCHES = (1, 2, 4, 8)


def possible_layouts(config: RunConfig, gpus: int, fp8: bool = False, attention: str = "flash") -> Iterator[Layout]:
    """Every layout of `gpus` GPUs for the model, batches and optimizer of `config`; with `fp8`, also those in FP8.

    Experts are not split (ETP 1) and stages not interleaved: those save no memory that EP and PP do not.
    """
    for cut in _cuts(config, gpus):
        micro_batches = [size for size in MICRO_BATCHES if _batches_fit(config, cut, size)]
        for micro_batch in micro_batches:
            for recompute in _recomputes(attention):
                for eight_bits in (False, True) if fp8 else (False,):
                    for offload in (False, True):
                        options = {"recompute": recompute, "fp8": eight_bits, "offload": offload}
                        yield replace(cut, micro_batch=micro_batch, **options)


def _cuts(config: RunConfig, gpus: int) -> Iterator[Layout]:
    """TP, PP, CP and EP."""
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    experts = config.model.num_moe_experts is not None
    distributed = config.model.optim.name == "mcore_distributed_optim"
    for tp in sizes:
        for pp in sizes:
            for cp in sizes:
                for ep in sizes if experts else (1,):
                    if gpus % (tp * pp * cp) or gpus % (ep * pp):
                        continue
                    etp = 1 if experts else tp
                    cut = Layout(gpus, tp, ep, pp, cp, etp, distributed_optimizer=distributed)
                    if next(layout_complaints(cut.config(config), gpus), None) is None:
                        yield cut


def _recomputes(attention: str) -> tuple[str, ...]:
    """Without scores there is nothing that selective recompute, of the core attention, would save."""
    return ("none", "full") if attention == "flash" else ("none", "selective", "full")


def _batches_fit(config: RunConfig, layout: Layout, micro_batch: int) -> bool:
    """Whether prompts and responses come out even, as `nemo_sspo.config.validate` asks for."""
    prompts, step = config.trainer.grpo.num_prompts_per_grpo_step, config.model.global_batch_size
    return not (prompts % layout.dp or step % layout.dp or step // layout.dp % micro_batch)
