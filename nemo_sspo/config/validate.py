"""Range and cross-field checks on a loaded config, before anything heavy is imported or written.

Each check names the dotted key, what was given, what is allowed and what to do. Ranges are the table of
`nemo_sspo.config.ranges`; a relation between keys is one small function that yields its complaints.
"""

from __future__ import annotations

import dataclasses
import math
import string
from collections.abc import Iterator
from itertools import chain
from typing import Any

from nemo_sspo.config.keys import show
from nemo_sspo.config.layout import (
    data_parallel_ranks,
    data_parallel_size,
    interleaving_complaints,
    layout_complaints,
)
from nemo_sspo.config.ranges import RANGES
from nemo_sspo.config.schema import OptimizerConfig, RunConfig
from nemo_sspo.errors import UserError

_EXPERT_KEYS = ("moe_router_topk", "moe_ffn_hidden_size")
_WITHOUT_EXPERTS = {
    "moe_aux_loss_coeff": 0.0,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": 1,
    "grpo.routing_replay.mode": "none",
}


def validate(config: RunConfig, world_size: int) -> None:
    """Refuse a config that cannot train, with the first reason found.

    Args:
        config: as `load_config` returns it.
        world_size: number of processes. torchrun decides how many there are, and
            ``trainer.num_nodes * trainer.devices`` does not have to agree.

    Raises:
        UserError: names the dotted key, the value, what is allowed and what to do.
    """
    complaints = chain(
        _finite(config),
        _ranges(config),
        _model(config),
        layout_complaints(config, world_size),
        _batches(config, world_size),
        interleaving_complaints(config, world_size),
        _lengths(config),
        _optimizers(config),
        _data(config),
    )
    for complaint in complaints:
        raise UserError(complaint)
    _objective(config)


def shape_complaints(config: RunConfig) -> Iterator[str]:
    """What is wrong with single values and with the model, whatever it runs on."""
    return chain(_ranges(config), _model(config))


def _finite(config: RunConfig) -> Iterator[str]:
    def floats(node: Any, key: str) -> Iterator[tuple[str, float]]:
        if dataclasses.is_dataclass(node):
            for field in dataclasses.fields(node):
                yield from floats(getattr(node, field.name), f"{key}.{field.name}".lstrip("."))
        elif isinstance(node, list):
            for index, item in enumerate(node):
                yield from floats(item, f"{key}[{index}]")
        elif isinstance(node, float):
            yield key, node

    for key, value in floats(config, ""):
        if not math.isfinite(value):
            yield f"{key}: got {value}, allowed: a finite number"


def _ranges(config: RunConfig) -> Iterator[str]:
    for rule, section, names, remedy in RANGES:
        for name in names.split():
            value = _get(config, f"{section}.{name}")
            if not rule.holds(value):
                advice = f"; {remedy}" if remedy else ""
                yield f"{section}.{name}: got {show(value)}, allowed: {rule.allowed}{advice}"


def _model(config: RunConfig) -> Iterator[str]:
    model = config.model
    if model.num_attention_heads % model.num_query_groups:
        yield (
            f"model.num_query_groups: got {model.num_query_groups}, allowed: a divisor of "
            f"model.num_attention_heads={model.num_attention_heads}; each query group serves equally many heads"
        )
    if model.transformer_engine and config.trainer.accelerator != "gpu":
        yield (
            f"model.transformer_engine: got true, allowed: null or false with trainer.accelerator="
            f"{config.trainer.accelerator}; its kernels run on GPUs only"
        )
    experts = model.num_moe_experts
    needed, unused = (_EXPERT_KEYS, ("ffn_hidden_size",)) if experts else (("ffn_hidden_size",), _EXPERT_KEYS)
    because = f"because model.num_moe_experts={show(experts)}: {'every' if experts else 'no'} layer has experts"
    for name in needed:
        if getattr(model, name) is None:
            yield f"model.{name}: got null, allowed: >= 1, {because}"
    for name in unused:
        if getattr(model, name) is not None:
            yield f"model.{name}: got {getattr(model, name)}, allowed: null, {because}"
    if experts is None:
        for name, allowed in _WITHOUT_EXPERTS.items():
            value = _get(config, f"model.{name}")
            if value != allowed:
                yield f"model.{name}: got {show(value)}, allowed: {allowed}, {because}"
    elif model.moe_router_topk and model.moe_router_topk > experts:
        yield f"model.moe_router_topk: got {model.moe_router_topk}, allowed: at most model.num_moe_experts={experts}"


def _batches(config: RunConfig, world_size: int) -> Iterator[str]:
    grpo, model = config.trainer.grpo, config.model
    responses = grpo.num_prompts_per_grpo_step * grpo.samples_per_prompt
    if grpo.optimizer_steps_per_rollout * model.global_batch_size != responses:
        yield (
            f"model.global_batch_size: got {model.global_batch_size}, which times "
            f"trainer.grpo.optimizer_steps_per_rollout={grpo.optimizer_steps_per_rollout} must equal the "
            f"{responses} responses of a rollout (trainer.grpo.num_prompts_per_grpo_step="
            f"{grpo.num_prompts_per_grpo_step} x trainer.grpo.samples_per_prompt={grpo.samples_per_prompt}); "
            + _batch_advice(responses, grpo.optimizer_steps_per_rollout)
        )
    size, ranks = data_parallel_size(model, world_size), f"the {data_parallel_ranks(model, world_size)}"
    if model.global_batch_size % size:
        yield f"model.global_batch_size: got {model.global_batch_size}, allowed: a multiple of {ranks}"
    share = model.global_batch_size // size
    if share % min(model.micro_batch_size, max(share, 1)):
        yield (
            f"model.micro_batch_size: got {model.micro_batch_size}, allowed: a divisor of the {share} responses that a "
            f"rank has in an optimizer step (model.global_batch_size={model.global_batch_size} over {ranks}), "
            "or more than that"
        )
    if config.trainer.sft.max_steps and model.sft.global_batch_size % size:
        yield f"model.sft.global_batch_size: got {model.sft.global_batch_size}, allowed: a multiple of {ranks}"
    if grpo.num_prompts_per_grpo_step % size:
        yield (
            f"trainer.grpo.num_prompts_per_grpo_step: got {grpo.num_prompts_per_grpo_step}, allowed: a multiple of "
            f"{ranks}; every one of them samples for equally many prompts"
        )


def _batch_advice(responses: int, optimizer_steps: int) -> str:
    if responses % optimizer_steps == 0:
        return f"set model.global_batch_size={responses // optimizer_steps}"
    return f"choose trainer.grpo.optimizer_steps_per_rollout as a divisor of {responses}"


def _lengths(config: RunConfig) -> Iterator[str]:
    longest, context = config.model.grpo.length_params.max_length, config.model.encoder_seq_length
    if longest >= context:
        yield (
            f"model.grpo.length_params.max_length: got {longest}, allowed: less than "
            f"model.encoder_seq_length={context}, which holds the prompt and the response"
        )


def _optimizers(config: RunConfig) -> Iterator[str]:
    name, cold_start = config.model.optim.name, config.model.sft.optim.name
    if config.trainer.sft.max_steps and cold_start != name:
        yield (
            f"model.sft.optim.name: got {cold_start}, allowed: {name}, as model.optim.name; both stages share one set "
            "of gradient buffers"
        )
    optimizers: dict[str, OptimizerConfig] = {
        "model.optim": config.model.optim,
        "model.sft.optim": config.model.sft.optim,
    }
    for key, optim in optimizers.items():
        if len(optim.betas) != 2 or not all(0 <= beta < 1 for beta in optim.betas):
            yield f"{key}.betas: got {optim.betas}, allowed: two numbers in [0, 1), such as [0.9, 0.98]"
        if optim.sched.min_lr > optim.lr:
            yield f"{key}.sched.min_lr: got {optim.sched.min_lr}, allowed: at most {key}.lr={optim.lr}"


def _data(config: RunConfig) -> Iterator[str]:
    tokenizer, data = config.model.tokenizer, config.model.data
    if tokenizer.library == "huggingface" and not tokenizer.type:
        yield (
            f"model.tokenizer.type: got {show(tokenizer.type)}, allowed: a tokenizer folder, "
            "because model.tokenizer.library=huggingface"
        )
    if data.synthetic.min_digits > data.synthetic.max_digits:
        yield (
            f"model.data.synthetic.min_digits: got {data.synthetic.min_digits}, allowed: at most "
            f"model.data.synthetic.max_digits={data.synthetic.max_digits}"
        )
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(data.prompt_template) if name is not None}
    except ValueError:
        names = set()
    if names != {"question"}:
        yield (
            f"model.data.prompt_template: got {data.prompt_template!r}, allowed: a text with the one placeholder "
            "{question}; write {{ and }} for braces"
        )


def _objective(config: RunConfig) -> None:
    """The objective's name and options, by its own rules. Last, because it imports torch."""
    from nemo_sspo.objective import build_objective

    build_objective(dataclasses.asdict(config.model.grpo.objective))


def _get(config: RunConfig, key: str) -> Any:
    node: Any = config
    for name in key.split("."):
        node = getattr(node, name)
    return node
