"""The parallel layout, checked against what Megatron-Core can split, before any model is built.

A run of W processes is W = tp x pp x cp x (data parallel) for attention, embedding and output, and
W = etp x ep x pp x (expert data parallel) for the experts. The rules are those of Megatron-Core 0.16.1.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

from nemo_sspo.config.keys import show
from nemo_sspo.config.schema import ModelConfig, RunConfig

_DENSE = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
_EXPERTS = ("expert_tensor_parallel_size", "expert_model_parallel_size", "pipeline_model_parallel_size")
_STAGES = ("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size")

# size -> what it must divide, and why
_SHARES: dict[str, tuple[tuple[str, ...], str]] = {
    "tensor_model_parallel_size": (
        ("num_attention_heads", "num_query_groups"),
        "every rank has equally many heads and query groups",
    ),
    "pipeline_model_parallel_size": (("num_layers",), "every stage has equally many layers"),
}
_EXPERT_SHARES: dict[str, tuple[tuple[str, ...], str]] = {
    "expert_model_parallel_size": (("num_moe_experts",), "every rank has equally many experts"),
    "expert_tensor_parallel_size": (("moe_ffn_hidden_size",), "every rank has an equal part of each expert"),
}
_DENSE_SHARES: dict[str, tuple[tuple[str, ...], str]] = {
    "tensor_model_parallel_size": (
        ("num_attention_heads", "num_query_groups", "ffn_hidden_size"),
        "every rank has equally many heads and query groups, and an equal part of each feed-forward layer",
    ),
}


def layout_complaints(config: RunConfig, world_size: int) -> Iterator[str]:
    """What keeps `world_size` processes from being laid out as ``model.*_parallel_size`` say."""
    model = config.model
    return chain(
        _shares(model),
        _vocabulary(model),
        _sequence_parallel(model),
        _context_parallel(model),
        _virtual_pipeline(model),
        _recompute(model),
        _recomputed_layers(model),
        _processes(model, world_size),
    )


def data_parallel_size(model: ModelConfig, world_size: int) -> int:
    """How many ranks take a share of each batch; the others of `world_size` work on the same share."""
    return world_size // _product(model, _DENSE)


def data_parallel_ranks(model: ModelConfig, world_size: int) -> str:
    """`data_parallel_size` in words, and how it comes about."""
    size = data_parallel_size(model, world_size)
    return f"{_count(size, 'data-parallel rank')} ({_over(model, _count(world_size, 'process', 'es'), _DENSE)})"


def _shares(model: ModelConfig) -> Iterator[str]:
    for name, (wholes, reason) in (_SHARES | (_EXPERT_SHARES if model.num_moe_experts else _DENSE_SHARES)).items():
        size, numbers = getattr(model, name), [getattr(model, whole) for whole in wholes]
        if any(number % size for number in numbers):
            named = " and of ".join(f"model.{whole}={getattr(model, whole)}" for whole in wholes)
            nearest = _nearest(size, _divisors(math.gcd(*numbers)))
            yield f"model.{name}: got {size}, allowed: a divisor of {named}; {nearest}; {reason}"


def _vocabulary(model: ModelConfig) -> Iterator[str]:
    """The tokenizer's ids are padded, to a number of rows that every tensor-parallel rank has an equal part of."""
    multiple, size = model.make_vocab_size_divisible_by, model.tensor_model_parallel_size
    if multiple % size:
        yield (
            f"model.make_vocab_size_divisible_by: got {multiple}, allowed: a multiple of "
            f"model.tensor_model_parallel_size={size}; {_nearest(multiple, _multiples(size, multiple))}; "
            "every rank has equally many rows of the vocabulary, which is padded for that"
        )


def _sequence_parallel(model: ModelConfig) -> Iterator[str]:
    """Megatron-Core's MoE layer refuses to train without it under tensor parallelism; elsewhere its config does."""
    wanted = model.tensor_model_parallel_size > 1
    if model.sequence_parallel != wanted:
        reason = (
            "Megatron-Core trains experts under tensor parallelism together with sequence parallelism only"
            if model.num_moe_experts
            else "tensor parallelism goes together with sequence parallelism here"
            if wanted
            else "sequence parallelism splits over the tensor-parallel ranks, and there is one"
        )
        yield (
            f"model.sequence_parallel: got {show(model.sequence_parallel)}, allowed: {show(wanted)}, because "
            f"model.tensor_model_parallel_size={model.tensor_model_parallel_size}; {reason}"
        )


def _context_parallel(model: ModelConfig) -> Iterator[str]:
    if model.context_parallel_size != 1:
        reason = (
            "context parallelism needs Transformer Engine's attention, which is not installed"
            if importlib.util.find_spec("transformer_engine") is None
            else "this version's driver has no path for context parallelism"
        )
        yield f"model.context_parallel_size: got {model.context_parallel_size}, allowed: 1; {reason}"


def _virtual_pipeline(model: ModelConfig) -> Iterator[str]:
    size, stages = model.virtual_pipeline_model_parallel_size, model.pipeline_model_parallel_size
    if size is None or model.num_layers % stages:
        return
    key = f"model.virtual_pipeline_model_parallel_size: got {size}, allowed: null"
    layers = _over(model, f"model.num_layers={model.num_layers}", _STAGES[:1])
    possible = _divisors(model.num_layers // stages)[1:]
    if stages == 1:
        yield f"{key}, because model.pipeline_model_parallel_size=1; there are no stages to interleave"
    elif not possible:
        yield f"{key}, because a stage has 1 layer ({layers}); it takes 2 to interleave"
    elif size not in possible:
        yield (
            f"{key} or a divisor of the {model.num_layers // stages} layers of a stage ({layers}), 2 or more; "
            f"{_nearest(size, possible)}; every model chunk has equally many layers"
        )


def _recompute(model: ModelConfig) -> Iterator[str]:
    """Method and number of layers belong to full recompute, which needs them."""
    granularity, method = model.activations_checkpoint_granularity, model.activations_checkpoint_method
    because = f"because model.activations_checkpoint_granularity={show(granularity)}"
    if granularity == "full":
        if method is None:
            yield (
                f"model.activations_checkpoint_method: got null, allowed: uniform or block, {because}; uniform "
                "computes all layers again, block the first model.activations_checkpoint_num_layers"
            )
        return
    for name in ("activations_checkpoint_method", "activations_checkpoint_num_layers"):
        value = getattr(model, name)
        if value is not None:
            yield f"model.{name}: got {show(value)}, allowed: null, {because}; only full recompute has it"


def _recomputed_layers(model: ModelConfig) -> Iterator[str]:
    """Megatron-Core indexes past the last layer where blocks of uniform recompute do not come out even."""
    chunks = _product(model, _STAGES)
    if model.activations_checkpoint_granularity != "full" or model.num_layers % chunks:
        return
    value, layers = model.activations_checkpoint_num_layers, model.num_layers // chunks
    uniform = model.activations_checkpoint_method == "uniform"
    possible = _divisors(layers) if uniform else range(1, layers + 1)
    if value not in possible:
        where = _over(model, f"model.num_layers={model.num_layers}", _STAGES)
        yield (
            f"model.activations_checkpoint_num_layers: got {show(value)}, allowed: "
            f"{'a divisor of' if uniform else 'from 1 to'} the {_count(layers, 'layer')} of a model chunk ({where}), "
            f"because model.activations_checkpoint_granularity='full'; {_nearest(value or 0, possible)}"
        )


def _processes(model: ModelConfig, world_size: int) -> Iterator[str]:
    smallest = math.lcm(_product(model, _DENSE), _product(model, _EXPERTS))
    for names in (_DENSE, _EXPERTS):
        size = _product(model, names)
        if world_size % size:
            advice = (
                f"start more, as in `torchrun --nproc-per-node={smallest} -m nemo_sspo train ...`"
                if world_size == 1
                else "torchrun or srun decides how many there are"
            )
            yield (
                f"{_factors(model, names)}: got {_count(world_size, 'process', 'es')}, allowed: a multiple of {size}; "
                f"{_nearest(world_size, _multiples(smallest, world_size))}; {advice}"
            )


class _Pass(NamedTuple):
    """A run of Megatron-Core's schedule over a rank's share of the responses."""

    key: str  # what sets the size of its micro-batches
    size: int
    rows: int
    even: bool  # rows is a multiple of the size
    batch: str  # the key that sets the number of responses

    def count(self, size: int) -> int:
        return -(-self.rows // size)

    def fits(self, size: int, stages: int) -> bool:
        return self.count(size) % stages == 0 and not (self.even and self.rows % size)


def _passes(config: RunConfig, data_parallel: int) -> list[_Pass]:
    grpo, model = config.trainer.grpo, config.model
    step = ("model.micro_batch_size", model.micro_batch_size)
    forward = ("model.grpo.forward_micro_batch_size", model.grpo.forward_micro_batch_size)
    responses = grpo.num_prompts_per_grpo_step * grpo.samples_per_prompt
    passes = [
        _Pass(*step, model.global_batch_size // data_parallel, True, "model.global_batch_size"),
        _Pass(*forward, responses // data_parallel, False, "trainer.grpo.num_prompts_per_grpo_step"),
    ]
    if config.trainer.sft.max_steps:
        passes.append(_Pass(*step, model.sft.global_batch_size // data_parallel, False, "model.sft.global_batch_size"))
    return passes


def interleaving_complaints(config: RunConfig, world_size: int) -> Iterator[str]:
    """The interleaved schedule takes micro-batches in groups of one for each pipeline stage, forward passes included.

    For a layout and batches that are otherwise in order: those complaints come first.
    """
    model, stages = config.model, config.model.pipeline_model_parallel_size
    if model.virtual_pipeline_model_parallel_size is None:
        return
    data_parallel = data_parallel_size(model, world_size)
    passes = _passes(config, data_parallel)
    for one in passes:
        if one.count(one.size) % stages:
            yield (
                f"{one.key}: got {one.size}, which makes {_count(one.count(one.size), 'micro-batch', 'es')} of the "
                f"{_count(one.rows, 'response')} of a data-parallel rank ({one.batch} decides); allowed: a size that "
                f"makes a multiple of model.pipeline_model_parallel_size={stages}, because "
                f"model.virtual_pipeline_model_parallel_size={model.virtual_pipeline_model_parallel_size}; "
                + _micro_batch_advice(one, passes, stages, data_parallel)
            )


def _micro_batch_advice(one: _Pass, passes: list[_Pass], stages: int, data_parallel: int) -> str:
    alike = [other for other in passes if other.key == one.key]
    sizes = range(1, max(other.rows for other in alike) + 1)
    possible = [size for size in sizes if all(other.fits(size, stages) for other in alike)]
    if possible:
        return _nearest(one.size, possible)
    batch = next(other.batch for other in alike if other.rows % stages)  # with none, a size of 1 would fit
    return f"none fits, so choose {batch} as a multiple of {stages * data_parallel}"


def _nearest(value: int, possible: Sequence[int]) -> str:
    """`possible` ascends and does not hold `value`."""
    near = [number for number in possible if number < value][-1:] + [n for n in possible if n > value][:1]
    return f"the nearest possible {'is' if len(near) == 1 else 'are'} {' and '.join(map(str, near))}"


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def _multiples(size: int, number: int) -> list[int]:
    """Those around `number`, 0 left out."""
    below = number // size * size
    return [multiple for multiple in (below, below + size) if multiple]


def _product(model: ModelConfig, names: Iterable[str]) -> int:
    return math.prod(getattr(model, name) or 1 for name in names)


def _factors(model: ModelConfig, names: Iterable[str]) -> str:
    """``model.tensor_model_parallel_size=2 x ...``, of the sizes that are not 1."""
    sizes = ((name, getattr(model, name) or 1) for name in names)
    return " x ".join(f"model.{name}={size}" for name, size in sizes if size != 1)


def _over(model: ModelConfig, whole: str, names: Sequence[str]) -> str:
    """``8 processes / (model.tensor_model_parallel_size=2 x ...)``; only `whole` where nothing splits it."""
    factors = _factors(model, names)
    if not factors:
        return whole
    return f"{whole} / ({factors})" if " x " in factors else f"{whole} / {factors}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"
