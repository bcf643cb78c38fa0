"""``nemo-sspo plan``: a table of the possible layouts, best first."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path

from nemo_sspo.config.schema import RunConfig
from nemo_sspo.errors import UserError
from nemo_sspo.plan import rates
from nemo_sspo.plan.activations import ATTENTION
from nemo_sspo.plan.job import job_of, load_plan_config
from nemo_sspo.plan.layout import Layout
from nemo_sspo.plan.memory import FREE, GIB, KINDS, RESERVE, Job
from nemo_sspo.plan.possible import possible_layouts
from nemo_sspo.plan.ranking import Plan, rank
from nemo_sspo.plan.shape import parameter_count

EXAMPLES = """\
examples:
  nemo-sspo plan --config-name qwen3_30b_a3b --gpus 64
  nemo-sspo plan --config-name qwen3_30b_a3b --gpus 32 --gpu h100 --tp 1 --ep 8 --pp 1 --explain
  nemo-sspo plan --config-name qwen3_8b --gpus 8 --gpu h200 --generation-tp 2 model.encoder_seq_length=16384
"""

_FILTERS = {"tp": "tensor", "ep": "expert", "pp": "pipeline", "cp": "context"}
_SHORT = ("weights", "grads", "optim", "activ", "logits", "routes", "KV", "gen.w")  # of KINDS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    whole, above_0 = _number(int, "a whole number >= 1"), _number(float, "a number > 0")
    parser.add_argument("--config-name", required=True, metavar="NAME", help="a run's config, or one in conf/model")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="searched before ./conf and the package's conf")
    parser.add_argument("--gpus", required=True, type=whole, metavar="N", help="how many")
    parser.add_argument("--gpu", choices=rates.GPUS, default="h100", help="their rates (default: h100)")
    parser.add_argument("--gpu-memory", type=above_0, metavar="GIB", help="of one GPU (default: that kind's)")
    parser.add_argument("--attention", choices=ATTENTION, default="flash", help="local keeps scores (default: flash)")
    parser.add_argument("--generation-tp", type=whole, metavar="N", help="an engine with its own weights over N GPUs")
    parser.add_argument("--vocab-size", type=whole, metavar="N", help="of the tokenizer, where no key says it")
    parser.add_argument("--fp8", action="store_true", help="also layouts with FP8 matrix products")
    for name, what in _FILTERS.items():
        parser.add_argument(f"--{name}", type=whole, metavar="N", help=f"only this {what} parallel size")
    parser.add_argument("--micro-batch", type=whole, metavar="N", help="only micro-batches of N responses")
    parser.add_argument("--recompute", choices=("none", "selective", "full"), help="only this recomputation")
    parser.add_argument("--offload", choices=("on", "off"), help="only with the optimizer on the host in generation")
    parser.add_argument("--top", type=whole, default=20, metavar="N", help="lines of the table (default: 20)")
    parser.add_argument("--explain", action="store_true", help="also the sums of the first line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="config overrides in Hydra's syntax")


def run(arguments: argparse.Namespace) -> int:
    """Print the table. Exit status 0, also where nothing fits.

    Raises:
        UserError: a config or an option is wrong, or no layout is possible.
    """
    config = load_plan_config(arguments.config_name, arguments.overrides, arguments.config_dir)
    job = job_of(config, arguments.vocab_size, arguments.attention, arguments.generation_tp)
    _check(arguments, config)
    gpu = rates.GPUS[arguments.gpu]
    size = arguments.gpu_memory or gpu.memory
    layouts = _wanted(possible_layouts(config, arguments.gpus, arguments.fp8, arguments.attention), arguments, config)
    plans = rank(job, layouts, gpu, size, config.trainer.grpo.optimizer_steps_per_rollout)
    print(_heading(arguments, config, job, size))
    print(_table(job, plans[: arguments.top]))
    fit = sum(plan.fits for plan in plans)
    print(f"\n{len(plans)} layouts, {fit} fit; {min(len(plans), arguments.top)} shown. {rates.ASSUMED}.")
    if arguments.explain:
        print(_explained(plans[0]))
    return 0


def _check(arguments: argparse.Namespace, config: RunConfig) -> None:
    groups, tp = config.model.num_attention_heads, arguments.generation_tp
    if tp is not None and (groups % tp or arguments.gpus % tp):
        raise UserError(
            f"--generation-tp: got {tp}, allowed: a divisor of --gpus={arguments.gpus} and of "
            f"model.num_attention_heads={groups}"
        )
    if arguments.fp8 and config.trainer.precision != "bf16":
        raise UserError(f"--fp8: needs trainer.precision=bf16, got {config.trainer.precision}")


def _wanted(layouts: Iterable[Layout], arguments: argparse.Namespace, config: RunConfig) -> list[Layout]:
    """Those that the options ask for."""
    asked = {name: getattr(arguments, name) for name in (*_FILTERS, "micro_batch", "recompute")}
    asked["offload"] = {"on": True, "off": False}.get(arguments.offload)
    asked = {name: value for name, value in asked.items() if value is not None}
    every = list(layouts)
    if not every:
        raise UserError(_no_layout(config, arguments.gpus))
    wanted = [one for one in every if all(getattr(one, name) == value for name, value in asked.items())]
    if not wanted:
        options = " ".join(f"--{name.replace('_', '-')}={value}" for name, value in asked.items())
        known = {name: sorted({getattr(one, name) for one in every}) for name in asked}
        allowed = "; ".join(f"{name.replace('_', '-')} {', '.join(map(str, values))}" for name, values in known.items())
        raise UserError(
            f"{options}: no such layout of {arguments.gpus} GPUs for this model and these batches; each alone is "
            f"possible with: {allowed}"
        )
    return wanted


def _no_layout(config: RunConfig, gpus: int) -> str:
    def possible(numbers: Iterable[int]) -> list[int]:
        return list(islice((n for n in numbers if next(possible_layouts(config, n), None) is not None), 1))

    near = possible(range(gpus - 1, 0, -1)) + possible(range(gpus + 1, 2 * gpus + 1))
    prompts, step = config.trainer.grpo.num_prompts_per_grpo_step, config.model.global_batch_size
    return (
        f"--gpus: got {gpus}, allowed: a number with data-parallel ranks that divide "
        f"trainer.grpo.num_prompts_per_grpo_step={prompts} and model.global_batch_size={step}; "
        f"the nearest possible {'is' if len(near) == 1 else 'are'} {' and '.join(map(str, near)) or 'none'}"
    )


def _heading(arguments: argparse.Namespace, config: RunConfig, job: Job, size: float) -> str:
    batch, own = job.batch, arguments.generation_tp is None
    engine = "the trainer's weights" if own else f"an engine's own weights over {arguments.generation_tp} GPUs"
    return (
        f"{arguments.config_name}: {parameter_count(job.model, job.vocab_size):,} parameters on {arguments.gpus} "
        f"{arguments.gpu.upper()} of {size:g} GiB ({RESERVE / GIB:g} GiB and {FREE:.0%} kept free)\n"
        f"{batch.step} responses of up to {batch.sequence:,} tokens an optimizer step, precision "
        f"{config.trainer.precision}, {config.model.optim.name}, {batch.attention} attention; up to {batch.rows} rows "
        f"generated at once with {engine}\nGiB on the fullest GPU:"
    )


def _table(job: Job, plans: list[Plan]) -> str:
    header = ["TP", "EP", "PP", "CP", "DP", "micro", "recompute", "FP8", "offload", *_SHORT]
    header += ["train", "generate", "fits", "s/step", "tokens/s/GPU"]
    rows = [header, *(_row(job, plan) for plan in plans)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _row(job: Job, plan: Plan) -> list[str]:
    layout, held = plan.layout, plan.memory
    sizes = [layout.tp, layout.ep, layout.pp, layout.cp, layout.dp, layout.micro_batch]
    options = [layout.recompute, "yes" if layout.fp8 else "no", "yes" if layout.offload else "no"]
    amounts = [*(getattr(held, kind) for kind in KINDS), held.training, held.generation]
    speed = job.batch.step * job.batch.sequence / layout.gpus / plan.time.total
    times = ["yes" if plan.fits else "no", f"{plan.time.total:.2f}", f"{speed:,.0f}"]
    return [*map(str, sizes), *options, *(_gib(amount) for amount in amounts), *times]


def _gib(amount: int) -> str:
    return f"{amount / GIB:.1f}" if amount == 0 or amount >= 0.05 * GIB else f"{amount / GIB:.3f}"


def _explained(plan: Plan) -> str:
    layout = plan.layout
    cut = f"TP{layout.tp} EP{layout.ep} PP{layout.pp} CP{layout.cp} DP{layout.dp}, micro-batch {layout.micro_batch}"
    return f"\n{cut}, pipeline stage {plan.memory.stage}:\n{plan.memory.explain()}\n{plan.time.explain()}"


def _number(kind: Callable[[str], float], allowed: str) -> Callable[[str], float]:
    """A type of option: a finite number that is above 0."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < float("inf"):
            raise argparse.ArgumentTypeError(f"got {text!r}, allowed: {allowed}")
        return value

    return parse
