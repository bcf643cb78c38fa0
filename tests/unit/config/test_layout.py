"""`nemo_sspo.config.layout`: each refusal by its message, and whether Megatron-Core agrees with what is let through."""

from __future__ import annotations

import copy
import importlib.util
import re

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from nemo_sspo.config import load_config, validate
from nemo_sspo.config.layout import data_parallel_ranks, data_parallel_size, interleaving_complaints, layout_complaints
from nemo_sspo.config.schema import RunConfig
from nemo_sspo.errors import UserError

SHORT = {
    "tp": "tensor_model_parallel_size",
    "sp": "sequence_parallel",
    "pp": "pipeline_model_parallel_size",
    "vpp": "virtual_pipeline_model_parallel_size",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
    "cp": "context_parallel_size",
    "layers": "num_layers",
    "heads": "num_attention_heads",
    "groups": "num_query_groups",
    "experts": "num_moe_experts",
    "ffn": "moe_ffn_hidden_size",
    "pad": "make_vocab_size_divisible_by",
    "granularity": "activations_checkpoint_granularity",
    "method": "activations_checkpoint_method",
    "recomputed": "activations_checkpoint_num_layers",
    "mbs": "micro_batch_size",
    "gbs": "global_batch_size",
}
BASE = load_config("tiny_moe_cpu", ["model.num_layers=12", "model.num_attention_heads=8", "model.num_query_groups=4"])


def config_of(**values: object) -> RunConfig:
    """12 layers, 8 heads, 4 query groups, 8 experts of width 64, and `values` by the names of `SHORT`."""
    config = copy.deepcopy(BASE)
    for name, value in values.items():
        key = SHORT[name]
        assert hasattr(config.model, key)
        setattr(config.model, key, value)
    return config


def complaint(config: RunConfig, world_size: int) -> str:
    with pytest.raises(UserError) as caught:
        validate(config, world_size)
    message = str(caught.value)
    assert "\n" not in message
    return message


TP, PP, VPP = (f"model.{SHORT[name]}" for name in ("tp", "pp", "vpp"))
RECOMPUTE = "model.activations_checkpoint_"
REFUSED = {
    "heads": (
        {"tp": 3, "sp": True, "pad": 3},
        3,
        f"{TP}: got 3, allowed: a divisor of model.num_attention_heads=8 and of model.num_query_groups=4; "
        "the nearest possible are 2 and 4",
    ),
    "query groups, which Megatron-Core would copy": (
        {"tp": 8, "sp": True},
        8,
        f"{TP}: got 8, ... the nearest possible is 4",
    ),
    "vocabulary": (
        {"tp": 2, "sp": True, "pad": 5},
        2,
        f"model.make_vocab_size_divisible_by: got 5, allowed: a multiple of {TP}=2; the nearest possible are 4 and 6",
    ),
    "smaller than the vocabulary's padding": (
        {"tp": 2, "sp": True, "pad": 1},
        2,
        "model.make_vocab_size_divisible_by: got 1, ... the nearest possible is 2",
    ),
    "layers": (
        {"pp": 5},
        5,
        f"{PP}: got 5, allowed: a divisor of model.num_layers=12; the nearest possible are 4 and 6",
    ),
    "experts": (
        {"ep": 3},
        3,
        "model.expert_model_parallel_size: got 3, allowed: a divisor of model.num_moe_experts=8; "
        "the nearest possible are 2 and 4",
    ),
    "expert width": (
        {"etp": 80},
        80,
        "model.expert_tensor_parallel_size: got 80, allowed: a divisor of model.moe_ffn_hidden_size=64; "
        "the nearest possible is 64",
    ),
    "sequence parallelism missing": (
        {"tp": 2},
        2,
        f"model.sequence_parallel: got false, allowed: true, because {TP}=2; Megatron-Core trains experts",
    ),
    "sequence parallelism alone": (
        {"sp": True},
        1,
        f"model.sequence_parallel: got true, allowed: false, because {TP}=1;",
    ),
    "context": ({"cp": 2}, 2, "model.context_parallel_size: got 2, allowed: 1; "),
    "chunks without stages": ({"vpp": 2}, 1, f"{VPP}: got 2, allowed: null, because {PP}=1; there are no stages"),
    "chunks of one layer": (
        {"pp": 12, "vpp": 2},
        12,
        f"{VPP}: got 2, allowed: null, because a stage has 1 layer (model.num_layers=12 / {PP}=12)",
    ),
    "chunks": (
        {"pp": 2, "vpp": 4},
        2,
        f"{VPP}: got 4, allowed: null or a divisor of the 6 layers of a stage (model.num_layers=12 / {PP}=2), "
        "2 or more; the nearest possible are 3 and 6",
    ),
    "recompute without a method": (
        {"granularity": "full", "recomputed": 1},
        1,
        f"{RECOMPUTE}method: got null, allowed: uniform or block, because {RECOMPUTE}granularity='full'; uniform",
    ),
    "recompute without layers": (
        {"granularity": "full", "method": "uniform", "pp": 2},
        2,
        f"{RECOMPUTE}num_layers: got null, allowed: a divisor of the 6 layers of a model chunk "
        f"(model.num_layers=12 / {PP}=2), because {RECOMPUTE}granularity='full'; the nearest possible is 1",
    ),
    "more recomputed than there are": (
        {"granularity": "full", "method": "block", "pp": 2, "vpp": 3, "recomputed": 4},
        2,
        f"{RECOMPUTE}num_layers: got 4, allowed: from 1 to the 2 layers of a model chunk "
        f"(model.num_layers=12 / ({PP}=2 x {VPP}=3)), ... the nearest possible is 2",
    ),
    "uneven blocks of recompute": (
        {"granularity": "full", "method": "uniform", "recomputed": 5},
        1,
        f"{RECOMPUTE}num_layers: got 5, allowed: a divisor of the 12 layers of a model chunk (model.num_layers=12), "
        "... the nearest possible are 4 and 6",
    ),
    "method of selective recompute": (
        {"granularity": "selective", "method": "block"},
        1,
        f"{RECOMPUTE}method: got 'block', allowed: null, because {RECOMPUTE}granularity='selective'; only full",
    ),
    "layers of no recompute": (
        {"recomputed": 2},
        1,
        f"{RECOMPUTE}num_layers: got 2, allowed: null, because {RECOMPUTE}granularity=null; only full",
    ),
    "one process": (
        {"tp": 2, "sp": True, "pp": 2},
        1,
        f"{TP}=2 x {PP}=2: got 1 process, allowed: a multiple of 4; the nearest possible is 4; start more, as in "
        "`torchrun --nproc-per-node=4 -m nemo_sspo train ...`",
    ),
    "processes": (
        {"tp": 2, "sp": True, "pp": 2},
        6,
        f"{TP}=2 x {PP}=2: got 6 processes, allowed: a multiple of 4; the nearest possible are 4 and 8; "
        "torchrun or srun decides how many there are",
    ),
    "processes of the experts": (
        {"tp": 2, "sp": True, "pp": 3, "ep": 2, "etp": 2},
        6,
        f"model.expert_tensor_parallel_size=2 x model.expert_model_parallel_size=2 x {PP}=3: got 6 processes, "
        "allowed: a multiple of 12; the nearest possible is 12; ",
    ),
    "processes of both": (
        {"tp": 2, "sp": True, "ep": 4, "pp": 3, "etp": 1},
        30,
        f"model.expert_model_parallel_size=4 x {PP}=3: got 30 processes, ... the nearest possible are 24 and 36",
    ),
}


@pytest.mark.parametrize(("values", "world_size", "text"), REFUSED.values(), ids=REFUSED)
def test_refused(values, world_size, text):
    beginning, _, later = text.partition(" ... ")
    message = complaint(config_of(**values), world_size)
    assert message.startswith(beginning)
    assert later in message


@pytest.mark.parametrize(
    ("installed", "reason"),
    [
        (None, "context parallelism needs Transformer Engine's attention, which is not installed"),
        ("it is", "this version's driver has no path for context parallelism"),
    ],
)
def test_context_parallelism_says_what_is_missing(monkeypatch, installed, reason):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: installed)
    assert complaint(config_of(cp=2), 2) == f"model.context_parallel_size: got 2, allowed: 1; {reason}"


ALLOWED = [
    ({}, 1),
    ({}, 2),
    ({"tp": 2, "sp": True}, 2),
    ({"tp": 4, "sp": True, "etp": 4}, 4),
    ({"pp": 2}, 2),
    ({"pp": 3}, 12),
    ({"ep": 4}, 4),
    ({"etp": 2}, 2),
    ({"tp": 2, "sp": True, "pp": 2, "ep": 2}, 8),
    ({"tp": 2, "sp": True, "pp": 2, "ep": 2, "etp": 2}, 8),
    ({"tp": 2, "sp": True, "pp": 2, "ep": 4}, 8),  # the experts of both tensor-parallel ranks' batches
    ({"pp": 2, "mbs": 32}, 2),  # one micro-batch: only the interleaved schedule asks for more
    ({"tp": 2, "sp": True, "pad": 2}, 2),
    ({"granularity": "selective"}, 1),
    ({"granularity": "full", "method": "uniform", "recomputed": 3, "pp": 2}, 2),
    ({"granularity": "full", "method": "block", "recomputed": 5, "pp": 2}, 2),
]


@pytest.mark.parametrize(("values", "world_size"), ALLOWED)
def test_allowed(values, world_size):
    validate(config_of(**values), world_size)


def test_data_parallel_ranks():
    split = config_of(tp=2, sp=True, pp=2).model
    assert data_parallel_size(split, 8) == 2
    assert data_parallel_ranks(split, 8) == f"2 data-parallel ranks (8 processes / ({TP}=2 x {PP}=2))"
    assert data_parallel_ranks(config_of(pp=2).model, 2) == f"1 data-parallel rank (2 processes / {PP}=2)"
    assert data_parallel_ranks(config_of().model, 3) == "3 data-parallel ranks (3 processes)"


class TestInterleaving:
    """16 prompts x 8 responses, 4 optimizer steps of 32; the cold start's batch is 64."""

    def config(self, **values: int) -> RunConfig:
        config = config_of(**values)
        config.model.grpo.forward_micro_batch_size = 8
        return config

    @pytest.mark.parametrize(("stages", "chunks", "world_size"), [(2, 2, 2), (2, 3, 4), (4, 3, 4)])
    def test_allowed(self, stages, chunks, world_size):
        validate(self.config(pp=stages, vpp=chunks, mbs=8), world_size)

    def test_the_optimizer_step(self):
        message = complaint(self.config(pp=2, vpp=2, mbs=32), 2)
        assert message.startswith(
            "model.micro_batch_size: got 32, which makes 1 micro-batch of the 32 responses of a data-parallel rank "
            f"(model.global_batch_size decides); allowed: a size that makes a multiple of {PP}=2, because {VPP}=2; "
        )
        assert message.endswith("the nearest possible is 16")

    def test_the_cold_start(self):
        config = self.config(pp=4, vpp=3, mbs=8)
        config.model.sft.global_batch_size = 20
        assert "makes 3 micro-batches of the 20 responses" in complaint(config, 4)
        assert complaint(config, 4).endswith("the nearest possible is 1")
        config.trainer.sft.max_steps = 0
        validate(config, 4)

    def test_the_log_probability_pass(self):
        config = self.config(pp=2, vpp=2, mbs=8)
        config.model.grpo.forward_micro_batch_size = 50
        message = complaint(config, 2)
        assert message.startswith(
            "model.grpo.forward_micro_batch_size: got 50, which makes 3 micro-batches of the 128 "
        )
        assert message.endswith("the nearest possible are 42 and 64")

    def test_no_size_fits(self):
        config = self.config(pp=4, vpp=3, mbs=32)
        config.model.sft.global_batch_size = 5
        assert complaint(config, 4).endswith("none fits, so choose model.sft.global_batch_size as a multiple of 4")
        config.model.sft.global_batch_size = 10
        assert complaint(config, 8).endswith("none fits, so choose model.sft.global_batch_size as a multiple of 8")

    def test_without_chunks_any_number_of_micro_batches_will_do(self):
        assert not list(interleaving_complaints(config_of(pp=4, mbs=32), 4))


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
