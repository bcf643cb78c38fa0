"""Time and memory of one optimizer step by layout, and how both grow with sequence length and batch.

    python -m tests.benchmarks.layouts [--layouts single tp2_sp ... --growth single tp2_sp --rounds 3 --quick]

From the checkout's root, on the CPU with gloo, one thread a rank, every rank on this machine. Three tables.

**By layout**, all on the same global batch. ``step`` is what the slowest rank took, the median over all steps of all
rounds, the layouts taking turns in processes of their own. ``processor`` is the processor seconds of all ranks
together: the work, with what is done twice and what communication costs, wherever it ran. ``peak`` is the largest
rank's peak resident memory from before the model was built to after two steps (how it is measured: measure.py; a
small model of the same layout ran before, so that libraries are loaded). ``state`` is what the largest rank holds
between steps: the storage of its parameters, gradient buffers and optimizer state, summed, so exact. Two ranks have
more than half each where something is whole on both: experts under TP without ETP, all but the experts under EP,
parameters and gradients under the distributed optimizer. A pipeline's last stage has the output layer.

**Growth** with length (rows fixed) and with rows (length fixed), one micro-batch size throughout. ``memory`` is the
step's peak on the largest rank, above what was resident before it. The slope is that of a least-squares line through
the logarithms: 1 is linear, 2 quadratic, 0 constant. Expected:

* time with length: a little above 1 at the long end, where attention's quadratic part shows, below 1 at the short end,
  where the optimizer's fixed cost and the dispatch of small operations do. Dense layers and experts are linear.
* time with rows: just below 1, for rows are independent and only the optimizer's cost is fixed.
* memory with length: between 1 and 2. The activations of dense layers are linear; the attention scores ``[b, heads, S,
  S]``, which are kept for the backward pass here (no flash attention on a CPU), are quadratic.
* memory with rows: about 0. Activations are those of one micro-batch; only the log-probs ``[B, T]`` grow with rows.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tests.benchmarks.measure import in_own_process, measure, print_table
from tests.distributed.launch import run_ranks
from tests.distributed.layouts import LAYOUTS, MODEL, Layout, loss_of

BASELINE = "single"
COMPARED = [BASELINE, "dp2", "dp2_distopt", "tp2_sp", "pp2", "pp2_vpp2", "ep2", "tp2_ep2_pp2"]
GROWN = [BASELINE, "tp2_sp"]
LIMIT = 300.0  # seconds, for one start of the ranks
MEGABYTE = 1e6


class Sizes(NamedTuple):
    """The model, and batches as (rows, length)."""

    model: tuple[str, ...]
    vocab: int
    micro_batch: int
    batch: tuple[int, int]  # of the comparison
    longer: list[tuple[int, int]]
    more: list[tuple[int, int]]
    steps: tuple[int, int]  # timed for each start of the ranks, in the comparison and for growth

    @property
    def growth(self) -> list[tuple[int, int]]:
        return list(dict.fromkeys(self.longer + self.more))


def _model(hidden: int, expert: int, length: int) -> tuple[str, ...]:
    keys = {"num_layers": 4, "hidden_size": hidden, "kv_channels": hidden // 4, "encoder_seq_length": length}
    keys |= {"num_attention_heads": 4, "num_query_groups": 2, "num_moe_experts": 8, "moe_ffn_hidden_size": expert}
    return tuple(f"model.{key}={value}" for key, value in keys.items())


FULL = Sizes(
    model=_model(128, 128, 512),
    vocab=4096,
    micro_batch=4,
    batch=(16, 64),
    longer=[(4, length) for length in (64, 128, 256, 512)],
    more=[(rows, 128) for rows in (4, 8, 16, 32)],
    steps=(5, 2),
)
QUICK = Sizes(
    model=_model(32, 32, 64),
    vocab=256,
    micro_batch=2,
    batch=(8, 16),
    longer=[(2, length) for length in (16, 64)],
    more=[(rows, 16) for rows in (2, 8)],
    steps=(2, 2),
)


# -- on every rank ------------------------------------------------------------------------------------------------


def measure_rank(
    rank: int, size: int, layout: Layout, sizes: Sizes, batches: list[tuple[int, int]], steps: int
) -> dict[str, Any]:
    """Peak bytes of building and two steps, bytes held, and for each batch what each of `steps` steps took."""
    from nemo_sspo.config.load import load_config
    from nemo_sspo.training.distributed import model_parallel_groups
    from tests.tiny import VOCAB, tiny_config, uneven_batch

    small = tiny_config(*MODEL, *layout.overrides)
    with model_parallel_groups(small.model) as groups:
        step(new_actor(small, VOCAB, groups, sizes.micro_batch, layout), uneven_batch(rows=sizes.batch[0]))
    gc.collect()

    config = load_config("tiny_moe_cpu", [*sizes.model, *layout.overrides])
    with model_parallel_groups(config.model) as groups:
        inputs = [full_batch(*batch, sizes.vocab) for batch in batches]
        actors = []

        def build_and_step() -> None:
            actors.append(new_actor(config, sizes.vocab, groups, sizes.micro_batch, layout))
            step(actors[0], inputs[0])
            step(actors[0], inputs[0])  # now with the optimizer's state

        peak = measure(build_and_step)["extra_bytes"]
        taken: list[list[dict]] = [[] for _ in inputs]
        for _ in range(steps):
            for batch, results in zip(inputs, taken, strict=True):
                dist.barrier()
                results.append(measure(lambda batch=batch: step(actors[0], batch)))
        return {"peak": peak, "state": state_bytes(actors[0]), "taken": taken}


def new_actor(config: Any, vocab: int, groups: Any, micro_batch: int, layout: Layout) -> Any:
    from nemo_sspo.config.schema import OptimizerConfig
    from nemo_sspo.model import build_model
    from nemo_sspo.training.actor import Actor

    policy = build_model(config.model, vocab, groups, config.trainer.precision)
    actor = Actor(policy, micro_batch, layout.distributed_optimizer)
    actor.set_optimizer(OptimizerConfig(lr=1e-4), clip_grad=1.0, total_steps=1000)
    return actor


def step(actor: Any, batch: Any) -> None:
    assert actor.step(batch, loss_of(batch)).finite


def full_batch(rows: int, length: int, vocab: int) -> Any:
    """Rows of one length, a quarter of it prompt: no padding."""
    from nemo_sspo.data.responses import ResponseBatch

    tokens = torch.randint(1, vocab, (rows, length), generator=torch.Generator().manual_seed(0))
    prompts = torch.full((rows,), length // 4)
    return ResponseBatch(tokens, prompts, length - prompts)


def state_bytes(actor: Any) -> int:
    """Bytes of storage of parameters, gradient buffers and optimizer state on this rank, each storage once."""
    storages = (tensor.untyped_storage() for tensor in _state(actor))
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _state(actor: Any) -> Iterator[Tensor]:
    for chunk in actor.chunks:
        yield from chunk.parameters()
        for buffer in chunk.buffers + chunk.expert_parallel_buffers:
            yield buffer.grad_data
            if buffer.param_data is not None:
                yield buffer.param_data
    for part in getattr(actor.optimizer, "chained_optimizers", [actor.optimizer]):
        if part.optimizer is not None:  # a stage may have no experts
            yield from chain.from_iterable(group["params"] for group in part.optimizer.param_groups)
            states = chain.from_iterable(state.values() for state in part.optimizer.state.values())
            yield from (value for value in states if isinstance(value, Tensor))


# -- in one interpreter for time, one for memory: the C library is told once how to allocate --------------------------


def time_phase(layouts: list[str], grown: list[str], sizes: Sizes, rounds: int) -> dict[str, Any]:
    """Layout -> its steps; layout -> seconds a step of each batch."""
    compared: dict[str, list[dict]] = {name: [] for name in layouts}
    growth: dict[str, list[list[dict]]] = {name: [[] for _ in sizes.growth] for name in grown}
    for _ in range(rounds):
        for name, steps in compared.items():
            steps += _over_ranks(_start(name, sizes, [sizes.batch], sizes.steps[0]))[0]
        for name, batches in growth.items():
            taken = _over_ranks(_start(name, sizes, sizes.growth, sizes.steps[1]))
            growth[name] = [before + new for before, new in zip(batches, taken, strict=True)]
    return {"layouts": compared, "growth": _medians(growth, "seconds")}


def memory_phase(layouts: list[str], grown: list[str], sizes: Sizes) -> dict[str, Any]:
    """Layout -> peak and state of its largest rank; layout -> peak extra bytes of a step of each batch."""
    compared = {}
    for name in layouts:
        ranks = _start(name, sizes, [sizes.batch], 0)
        compared[name] = {key: max(result[key] for result in ranks) for key in ("peak", "state")}
    growth = {name: [_over_ranks(_start(name, sizes, [batch], 3))[0] for batch in sizes.growth] for name in grown}
    return {"layouts": compared, "growth": _medians(growth, "extra_bytes")}


def _medians(growth: dict[str, list[list[dict]]], key: str) -> dict[str, list[float]]:
    return {name: [statistics.median(s[key] for s in steps) for steps in batches] for name, batches in growth.items()}


def _start(name: str, sizes: Sizes, batches: list[tuple[int, int]], steps: int) -> list[dict[str, Any]]:
    layout = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        return run_ranks(measure_rank, layout.processes, Path(folder), layout, sizes, batches, steps, limit=LIMIT)


def _over_ranks(ranks: list[dict[str, Any]]) -> list[list[dict[str, float]]]:
    """Of each step of each batch: the slowest rank's seconds, the largest one's bytes, all processor seconds."""
    return [
        [
            {
                "seconds": max(result["seconds"] for result in results),
                "extra_bytes": max(result["extra_bytes"] for result in results),
                "cpu_seconds": sum(result["cpu_seconds"] for result in results),
            }
            for results in zip(*of_batch, strict=True)
        ]
        for of_batch in zip(*(result["taken"] for result in ranks), strict=True)
    ]


# -- tables -------------------------------------------------------------------------------------------------------


def print_layouts(time: dict[str, list[dict]], memory: dict[str, dict[str, int]], sizes: Sizes, rounds: int) -> None:
    def median(name: str, key: str) -> float:
        return statistics.median(result[key] for result in time[name])

    def columns(value: float, baseline: float, unit: str) -> list[str]:
        return [f"{value:.1f} {unit}", f"{value / baseline:.2f}"]

    def timed(name: str, key: str) -> list[str]:
        return columns(median(name, key) * 1e3, median(BASELINE, key) * 1e3, "ms")

    def sized(name: str, key: str) -> list[str]:
        return columns(memory[name][key] / MEGABYTE, memory[BASELINE][key] / MEGABYTE, "MB")

    rows = []
    for name in time:
        seconds = [result["seconds"] * 1e3 for result in time[name]]
        cells = [*timed(name, "seconds"), f"{min(seconds):.0f}-{max(seconds):.0f}", *timed(name, "cpu_seconds")]
        cells += [*sized(name, "peak"), *sized(name, "state")]
        rows.append([name, str(LAYOUTS[name].processes), *cells])
    header = ["layout", "ranks", "step", "/ single", "range", "processor", "/ single", "peak", "/ single"]
    batch = "{} rows of {} tokens".format(*sizes.batch)
    title = f"One optimizer step, {batch}, micro-batches of {sizes.micro_batch}, {rounds} rounds of {sizes.steps[0]}"
    print_table(title, [*header, "state", "/ single"], rows)


def print_growth(title: str, axis: int, batches: list[tuple[int, int]], sizes: Sizes, **grown: dict) -> None:
    """`grown` is quantity -> layout -> value of each batch of ``sizes.growth``."""
    places = [sizes.growth.index(batch) for batch in batches]
    scale = {"time": (1e3, "ms"), "memory": (1 / MEGABYTE, "MB")}
    rows = []
    for name in grown["time"]:
        for quantity, (factor, unit) in scale.items():
            values = [grown[quantity][name][place] for place in places]
            cells = [f"{value * factor:.1f} {unit}" for value in values]
            rows.append([f"{name}: {quantity}", *cells, f"{log_slope([b[axis] for b in batches], values):.2f}"])
    print_table(title, ["", *(str(batch[axis]) for batch in batches), "slope"], rows)


def log_slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Of the least-squares line through (log x, log y)."""
    return statistics.linear_regression([math.log(v) for v in x], [math.log(max(v, 1e-9)) for v in y]).slope


def print_all(time: dict[str, Any], memory: dict[str, Any], sizes: Sizes, rounds: int) -> None:
    print_layouts(time["layouts"], memory["layouts"], sizes, rounds)
    most = max(LAYOUTS[name].processes for name in time["layouts"])
    cores = len(os.sched_getaffinity(0))
    print(f"\n{cores} cores for up to {most} ranks of one thread, load {os.getloadavg()[0]:.1f} at the end. Ranks that")
    print("share cores and memory say nothing about the speed of as many devices; memory does not depend on it.")
    grown = {"time": time["growth"], "memory": memory["growth"]}
    fixed = f"micro-batches of {sizes.micro_batch}"
    print_growth(f"Growth with length: {sizes.longer[0][0]} rows, {fixed}", 1, sizes.longer, sizes, **grown)
    print_growth(f"Growth with rows: length {sizes.more[0][1]}, {fixed}", 0, sizes.more, sizes, **grown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=COMPARED, help=f"always with {BASELINE}")
    parser.add_argument("--growth", nargs="+", choices=LAYOUTS, default=GROWN)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="small sizes, one round: to see that it works")
    parser.add_argument("--phase", choices=["time", "memory"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    sizes, rounds = (QUICK, 1) if options.quick else (FULL, options.rounds)
    layouts = [name for name in LAYOUTS if name in [*options.layouts, BASELINE]]
    if options.phase == "time":
        print(json.dumps(time_phase(layouts, options.growth, sizes, rounds)))
    elif options.phase == "memory":
        print(json.dumps(memory_phase(layouts, options.growth, sizes)))
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # gloo, so on the CPU even where there is a GPU
        flags = ["--layouts", *layouts, "--growth", *options.growth, f"--rounds={rounds}"]
        flags += ["--quick"] if options.quick else []
        print_all(_in_phase("time", flags), _in_phase("memory", flags), sizes, rounds)


def _in_phase(phase: str, flags: list[str]) -> dict[str, Any]:
    module = ("-m", "tests.benchmarks.layouts")
    result = in_own_process(*module, f"--phase={phase}", *flags, exact_memory=phase == "memory")
    if "failed" in result:
        raise SystemExit(f"{phase}: {result['failed']}")
    return result


if __name__ == "__main__":
    main()
