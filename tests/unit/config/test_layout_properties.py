"""`nemo_sspo.config.layout` for layouts drawn at random: Megatron-Core agrees, and every suggestion helps."""

from __future__ import annotations

import copy
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nemo_sspo.config.layout import interleaving_complaints, layout_complaints
from nemo_sspo.config.schema import RunConfig
from tests.unit.config.layouts import config_of

SIZES = st.integers(1, 9)
LAYOUTS = st.fixed_dictionaries(
    {
        "tp": SIZES,
        "sp": st.booleans(),
        "pp": SIZES,
        "vpp": st.none() | st.integers(2, 5),
        "ep": SIZES,
        "etp": SIZES,
        "layers": st.integers(1, 24),
        "heads": st.integers(1, 4).map(lambda n: 4 * n),
        "groups": st.sampled_from([1, 2, 4]),
        "experts": st.integers(1, 16),
        "ffn": st.integers(1, 16).map(lambda n: 4 * n),
        "pad": st.integers(1, 8),
        "granularity": st.sampled_from([None, "selective", "full"]),
        "method": st.sampled_from([None, "uniform", "block"]),
        "recomputed": st.none() | st.integers(1, 6),
    }
)
# Half of the layouts are drawn to be possible: at random, next to none would be.
POSSIBLE = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 3]),
        "vpp": st.sampled_from([None, 2]),
        "ep": st.sampled_from([1, 2, 4]),
        "etp": st.sampled_from([1, 2]),
        "granularity": st.sampled_from([None, "full"]),
        "method": st.sampled_from(["uniform", "block"]),
        "recomputed": st.sampled_from([1, 2]),
    }
).map(
    lambda d: (
        d
        | {"sp": d["tp"] > 1}
        | ({"vpp": None} if d["pp"] == 1 else {})
        | ({"method": None, "recomputed": None} if d["granularity"] is None else {})
    )
)


def megatron_takes(values: dict, world_size: int) -> bool:
    """Megatron-Core's own configuration and rules, but for the extra query groups that this project does not copy."""
    import torch
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_config import TransformerConfig

    model = config_of(**values).model
    try:
        config = TransformerConfig(
            num_layers=model.num_layers,
            hidden_size=model.hidden_size,
            num_attention_heads=model.num_attention_heads,
            num_query_groups=model.num_query_groups,
            num_moe_experts=model.num_moe_experts,
            moe_ffn_hidden_size=model.moe_ffn_hidden_size,
            moe_router_topk=2,
            add_bias_linear=False,
            tensor_model_parallel_size=model.tensor_model_parallel_size,
            sequence_parallel=model.sequence_parallel,
            pipeline_model_parallel_size=model.pipeline_model_parallel_size,
            virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
            expert_model_parallel_size=model.expert_model_parallel_size,
            expert_tensor_parallel_size=model.expert_tensor_parallel_size,
            pipeline_dtype=torch.float32,
            recompute_granularity=model.activations_checkpoint_granularity,
            recompute_method=model.activations_checkpoint_method,
            recompute_num_layers=model.activations_checkpoint_num_layers,
        )
        layers = get_num_layers_to_build(config, 0, 0)  # vp_stage, pp_rank
    except (ValueError, AssertionError):
        return False
    tp, pp, vpp = (
        config.tensor_model_parallel_size,
        config.pipeline_model_parallel_size,
        model.virtual_pipeline_model_parallel_size,
    )
    recomputed = config.recompute_num_layers
    return (
        world_size % (tp * pp) == 0
        and world_size % (model.expert_tensor_parallel_size * model.expert_model_parallel_size * pp) == 0
        and model.num_query_groups % tp == 0
        and model.make_vocab_size_divisible_by % tp == 0
        and model.num_moe_experts % model.expert_model_parallel_size == 0
        and model.moe_ffn_hidden_size % model.expert_tensor_parallel_size == 0
        and (tp == 1 or config.sequence_parallel)
        and (vpp is None or pp > 1)
        and (config.recompute_granularity == "full" or (config.recompute_method, recomputed) == (None, None))
        and (recomputed is None or recomputed <= layers)
        and (config.recompute_method != "uniform" or layers % recomputed == 0)
    )


@pytest.mark.filterwarnings("ignore")
@given(values=LAYOUTS | POSSIBLE, world_size=st.integers(1, 48) | st.sampled_from([12, 24, 48]))
def test_what_passes_is_what_megatron_takes(values, world_size):
    passes = not list(layout_complaints(config_of(**values), world_size))
    assert passes == megatron_takes(values, world_size)


def subject(message: str) -> str:
    """What a complaint is about: a key, or the number of processes."""
    key, _, given = message.partition(": got ")
    return "processes of " + re.sub(r"=\d+", "", key) if re.match(r"\d+ process", given) else key


def with_suggestion(config: RunConfig, world_size: int, message: str, value: int) -> tuple[RunConfig, int]:
    config = copy.deepcopy(config)
    if subject(message).startswith("processes"):
        return config, value
    *sections, name = subject(message).split(".")
    node = config
    for section in sections:
        node = getattr(node, section)
    setattr(node, name, value)
    return config, world_size


def suggestions(message: str) -> list[int]:
    found = re.search(r"the nearest possible (?:is|are) (\d+)(?: and (\d+))?", message)
    return [int(number) for number in found.groups() if number] if found else []


@given(values=LAYOUTS, world_size=st.integers(1, 48))
def test_every_suggestion_helps(values, world_size):
    config = config_of(**values)
    complaints = list(layout_complaints(config, world_size))
    assume(any(suggestions(message) for message in complaints))
    for message in complaints:
        for value in suggestions(message):
            changed, size = with_suggestion(config, world_size, message, value)
            assert subject(message) not in {subject(other) for other in layout_complaints(changed, size)}


@given(
    stages=st.integers(2, 4),
    data_parallel=st.integers(1, 3),
    shares=st.tuples(*[st.integers(1, 40)] * 2),
    sizes=st.tuples(*[st.integers(1, 40)] * 2),
)
def test_every_suggested_micro_batch_helps(stages, data_parallel, shares, sizes):
    config = config_of(layers=24, pp=stages, vpp=2, mbs=sizes[0], gbs=shares[0] * data_parallel)
    config.model.sft.global_batch_size = shares[1] * data_parallel
    config.trainer.grpo.num_prompts_per_grpo_step = shares[0] * data_parallel
    config.trainer.grpo.optimizer_steps_per_rollout = config.trainer.grpo.samples_per_prompt
    config.model.grpo.forward_micro_batch_size = sizes[1]
    assume(shares[0] % min(sizes[0], shares[0]) == 0)
    world_size = stages * data_parallel
    for message in interleaving_complaints(config, world_size):
        assert suggestions(message) or "none fits" in message
        for value in suggestions(message):
            changed, _ = with_suggestion(config, world_size, message, value)
            assert subject(message) not in {subject(other) for other in interleaving_complaints(changed, world_size)}
            validated = list(layout_complaints(changed, world_size))
            assert not validated
            if subject(message) == "model.micro_batch_size":
                assert shares[0] % value == 0
