"""``nemo-sspo train --dry-run``: a checked config's layout and what it needs of each GPU, without one."""

from __future__ import annotations

from nemo_sspo.config.schema import RunConfig
from nemo_sspo.plan import rates
from nemo_sspo.plan.job import job_of
from nemo_sspo.plan.layout import Layout
from nemo_sspo.plan.memory import GIB, layout_memory
from nemo_sspo.plan.shape import parameter_count
from nemo_sspo.plan.steptime import step_time


def describe(config: RunConfig, world_size: int) -> str:
    """Several lines: the model, the layout on `world_size` processes, bytes by kind, what fits, a step's time.

    Raises:
        UserError: the size of the vocabulary is not known.
    """
    on_gpu = config.trainer.accelerator == "gpu"
    flash = on_gpu and config.model.transformer_engine is not False and config.trainer.precision == "bf16"
    job, layout = job_of(config, attention="flash" if flash else "local"), Layout.of(config, world_size)
    held = layout_memory(job, layout)
    cut = f"TP{layout.tp} EP{layout.ep} ETP{layout.etp} PP{layout.pp} VPP{layout.vpp} CP{layout.cp} DP{layout.dp}"
    replay = config.model.grpo.routing_replay.mode
    lines = [
        f"{parameter_count(job.model, job.vocab_size):,} parameters, {world_size} processes: {cut}",
        f"micro-batches of {layout.micro_batch} of {job.batch.step} responses, recompute {layout.recompute}, precision "
        f"{config.trainer.precision}, {config.model.optim.name}, routing replay {replay}, objective "
        f"{config.model.grpo.objective.name}",
        f"run's folder: {config.exp_manager.explicit_log_dir}",
        "",
        f"the fullest process (pipeline stage {held.stage}), {job.batch.attention} attention:",
        held.explain(),
    ]
    if on_gpu:
        fits = {name: held.fits(gpu.memory * GIB) for name, gpu in rates.GPUS.items()}
        lines += ["", "fits: " + ", ".join(f"{name.upper()} {'yes' if fit else 'no'}" for name, fit in fits.items())]
        steps = config.trainer.grpo.optimizer_steps_per_rollout
        time = step_time(job, layout, held, next(iter(rates.GPUS.values())), steps)
        lines += [f"{next(iter(rates.GPUS)).upper()}: {time.total:.2f} s an optimizer step; {rates.ASSUMED}"]
    return "\n".join(lines)
