"""`nemo_sspo.config.layout`: each refusal by its message."""

from __future__ import annotations

import importlib.util

import pytest

from nemo_sspo.config import validate
from nemo_sspo.config.layout import data_parallel_ranks, data_parallel_size, interleaving_complaints
from nemo_sspo.config.schema import RunConfig
from nemo_sspo.errors import UserError
from tests.unit.config.layouts import SHORT, config_of


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
