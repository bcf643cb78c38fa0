"""`validate`: every range and every relation between keys, by the message it gives."""

from __future__ import annotations

import dataclasses

import pytest

from nemo_sspo.config import validate
from nemo_sspo.config.keys import schema_keys
from nemo_sspo.config.ranges import MONITORED, RANGES
from nemo_sspo.config.schema import ObjectiveConfig, RunConfig
from nemo_sspo.errors import UserError


def with_values(config: RunConfig, **values: object) -> RunConfig:
    """Set dotted keys (dots written as ``__``) without loading again."""
    for name, value in values.items():
        *sections, last = name.split("__")
        node: object = config
        for section in sections:
            node = getattr(node, section)
        assert hasattr(node, last)
        setattr(node, last, value)
    return config


def complaint(config: RunConfig, world_size: int = 1) -> str:
    with pytest.raises(UserError) as caught:
        validate(config, world_size)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def valid() -> RunConfig:
    from nemo_sspo.config import load_config

    return load_config("tiny_moe_cpu")


@pytest.fixture
def bend(valid):
    """`bend(trainer__grpo__max_steps=3)`: the tiny config with values changed."""
    import copy

    return lambda **values: with_values(copy.deepcopy(valid), **values)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_the_tiny_config_is_valid(bend, world_size):
    validate(bend(), world_size)


DENSE = {
    "model__num_moe_experts": None,
    "model__moe_router_topk": None,
    "model__moe_ffn_hidden_size": None,
    "model__ffn_hidden_size": 128,
}

OUT_OF_RANGE = [
    ("trainer__num_nodes", 0, ">= 1"),
    ("trainer__devices", 0, ">= 1"),
    ("trainer__accelerator", "tpu", "cpu or gpu"),
    ("trainer__precision", "fp8", "32 or bf16"),
    ("trainer__sft__max_steps", -1, ">= 0"),
    ("trainer__sft__gradient_clip_val", 0.0, "> 0"),
    ("trainer__sft__save_interval", 0, ">= 1"),
    ("trainer__grpo__max_steps", -1, ">= 0"),
    ("trainer__grpo__samples_per_prompt", 1, ">= 2"),
    ("trainer__grpo__num_prompts_per_grpo_step", 0, ">= 1"),
    ("trainer__grpo__optimizer_steps_per_rollout", 0, ">= 1"),
    ("trainer__grpo__generation_rollout_mbs", 0, ">= 1"),
    ("trainer__grpo__val_num_prompts_per_grpo_step", 0, ">= 1"),
    ("trainer__grpo__val_check_interval", -1, ">= 0"),
    ("trainer__grpo__save_interval", 0, ">= 1"),
    ("trainer__grpo__gradient_clip_val", -1.0, "> 0"),
    ("trainer__grpo__max_skipped_steps", 0, ">= 1"),
    ("trainer__grpo__num_logged_samples", -1, ">= 0"),
    ("exp_manager__checkpoint_callback_params__save_top_k", 0, "-1 or >= 1"),
    ("exp_manager__checkpoint_callback_params__save_top_k", -2, "-1 or >= 1"),
    (
        "exp_manager__checkpoint_callback_params__monitor",
        "loss",
        "null or pass_at_1 or sampled_accuracy or format or think_fraction or response_length/mean",
    ),
    ("exp_manager__checkpoint_callback_params__mode", "best", "max or min"),
    ("exp_manager__checkpoint_callback_params__on_error", "warn", "continue or stop"),
    ("model__seed", -1, ">= 0 and < 2**31"),
    ("model__seed", 2**31, ">= 0 and < 2**31"),
    ("exp_manager__explicit_log_dir", " ", "a folder"),
    ("model__moe_aux_loss_coeff", -0.1, ">= 0"),
    ("model__num_layers", 0, ">= 1"),
    ("model__hidden_size", 0, ">= 1"),
    ("model__num_attention_heads", 0, ">= 1"),
    ("model__num_query_groups", 0, ">= 1"),
    ("model__num_moe_experts", 0, "null or >= 1"),
    ("model__moe_router_topk", 0, "null or >= 1"),
    ("model__moe_ffn_hidden_size", 0, "null or >= 1"),
    ("model__ffn_hidden_size", 0, "null or >= 1"),
    ("model__override_vocab_size", 0, "null or >= 1"),
    ("model__grpo__routing_replay__mode", "r2", "none or R2 or R3"),
    ("model__kv_channels", 31, "even and >= 2"),
    ("model__kv_channels", 0, "even and >= 2"),
    ("model__layernorm_epsilon", 0.0, "> 0"),
    ("model__rotary_base", 0.0, "> 0"),
    ("model__init_method_std", 0.0, "> 0"),
    ("model__make_vocab_size_divisible_by", 0, ">= 1"),
    *(
        (f"model__{name}_parallel_size", 0, ">= 1")
        for name in ("tensor_model", "pipeline_model", "expert_model", "expert_tensor", "context")
    ),
    ("model__virtual_pipeline_model_parallel_size", 1, "null or >= 2"),
    ("model__activations_checkpoint_granularity", "partial", "null or selective or full"),
    ("model__activations_checkpoint_method", "all", "null or uniform or block"),
    ("model__activations_checkpoint_num_layers", 0, "null or >= 1"),
    ("model__encoder_seq_length", 0, ">= 1"),
    ("model__micro_batch_size", 0, ">= 1"),
    ("model__global_batch_size", 0, ">= 1"),
    ("model__sft__global_batch_size", 0, ">= 1"),
    ("model__grpo__forward_micro_batch_size", 0, ">= 1"),
    ("model__grpo__generation__backend", "vllm", "native"),
    ("model__grpo__length_params__max_length", 0, ">= 1"),
    ("model__grpo__sampling_params__temperature", 0.0, "> 0"),
    ("model__grpo__sampling_params__top_k", 5, "0"),
    ("model__grpo__sampling_params__top_p", 0.9, "1.0"),
    ("model__tokenizer__library", "megatron", "arithmetic or huggingface"),
    ("model__data__synthetic__min_digits", 0, ">= 1"),
    ("model__data__synthetic__max_digits", 0, ">= 1"),
    ("model__data__synthetic__num_train", 0, ">= 1"),
    ("model__data__synthetic__num_validation", 0, ">= 1"),
    ("model__data__synthetic__num_test", 0, ">= 1"),
    ("model__data__synthetic__empty_think_even", 1.5, "between 0 and 1"),
    ("model__data__synthetic__empty_think_odd", -0.1, "between 0 and 1"),
    ("model__data__synthetic__missing_tag", 2.0, "between 0 and 1"),
    *(
        (f"{optim}__{name}", value, allowed)
        for optim in ("model__optim", "model__sft__optim")
        for name, value, allowed in [
            ("name", "sgd", "adam or mcore_distributed_optim"),
            ("lr", 0.0, "> 0"),
            ("eps", 0.0, "> 0"),
            ("weight_decay", -1.0, ">= 0"),
            ("sched__name", "cosine", "CosineAnnealing or Linear or Constant"),
            ("sched__warmup_steps", -1, ">= 0"),
            ("sched__min_lr", -1.0, ">= 0"),
        ]
    ),
]


@pytest.mark.parametrize(("name", "value", "allowed"), OUT_OF_RANGE)
def test_out_of_range(bend, name, value, allowed):
    key = name.replace("__", ".")
    assert complaint(bend(**{name: value})).partition("; ")[0] == f"{key}: got {value!r}, allowed: {allowed}"


def test_every_range_is_tested():
    ranged = {f"{section}.{name}" for _, section, names, _ in RANGES for name in names.split()}
    assert ranged == {name.replace("__", ".") for name, _, _ in OUT_OF_RANGE}
    assert ranged <= set(schema_keys())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model__optim__lr", "model__data__synthetic__missing_tag"])
def test_not_finite(bend, name, value):
    assert complaint(bend(**{name: value})) == f"{name.replace('__', '.')}: got {value}, allowed: a finite number"


@pytest.mark.parametrize(
    "values",
    [
        {"trainer__precision": "bf16"},  # on a CPU too
        {"exp_manager__checkpoint_callback_params__monitor": None},
        {"exp_manager__checkpoint_callback_params__mode": "min"},
        {"exp_manager__checkpoint_callback_params__on_error": "stop"},
        {"model__optim__name": "mcore_distributed_optim", "model__sft__optim__name": "mcore_distributed_optim"},
    ],
)
def test_in_range(bend, values):
    validate(bend(**values), 1)


def test_not_finite_in_a_list(bend):
    message = complaint(bend(model__optim__betas=[0.9, float("nan")]))
    assert message == "model.optim.betas[1]: got nan, allowed: a finite number"


@pytest.mark.parametrize(
    ("values", "beginning", "remedy"),
    [
        (
            {"trainer__grpo__samples_per_prompt": 1},
            "trainer.grpo.samples_per_prompt: got 1",
            "a group of 1 has none",
        ),
        (
            {"model__grpo__sampling_params__temperature": 0.0},
            "model.grpo.sampling_params.temperature: got 0.0",
            "temperature 0 is greedy",
        ),
        (
            {"model__transformer_engine": True},
            "model.transformer_engine: got true, allowed: null or false with trainer.accelerator=cpu",
            "its kernels run on GPUs only",
        ),
        (
            {"model__num_query_groups": 3},
            "model.num_query_groups: got 3, allowed: a divisor of model.num_attention_heads=4",
            "equally many heads",
        ),
        (
            {"model__moe_router_topk": 9},
            "model.moe_router_topk: got 9, allowed: at most model.num_moe_experts=8",
            "",
        ),
        (
            {"model__moe_router_topk": None},
            "model.moe_router_topk: got null, allowed: >= 1, because model.num_moe_experts=8",
            "every layer has experts",
        ),
        (
            {"model__ffn_hidden_size": 64},
            "model.ffn_hidden_size: got 64, allowed: null, because model.num_moe_experts=8",
            "every layer has experts",
        ),
        (
            DENSE | {"model__ffn_hidden_size": None},
            "model.ffn_hidden_size: got null, allowed: >= 1, because model.num_moe_experts=null",
            "no layer has experts",
        ),
        (
            DENSE | {"model__moe_ffn_hidden_size": 64},
            "model.moe_ffn_hidden_size: got 64, allowed: null, because model.num_moe_experts=null",
            "",
        ),
        (
            DENSE | {"model__expert_model_parallel_size": 2},
            "model.expert_model_parallel_size: got 2, allowed: 1, because model.num_moe_experts=null",
            "",
        ),
        (
            DENSE | {"model__grpo__routing_replay__mode": "R2"},
            "model.grpo.routing_replay.mode: got 'R2', allowed: none, because model.num_moe_experts=null",
            "",
        ),
        (
            {"model__global_batch_size": 16},
            "model.global_batch_size: got 16, which times trainer.grpo.optimizer_steps_per_rollout=4 must equal the "
            "128 responses of a rollout",
            "set model.global_batch_size=32",
        ),
        (
            {"trainer__grpo__optimizer_steps_per_rollout": 3},
            "model.global_batch_size: got 32, which times trainer.grpo.optimizer_steps_per_rollout=3",
            "choose trainer.grpo.optimizer_steps_per_rollout as a divisor of 128",
        ),
        (
            {"model__micro_batch_size": 24},
            "model.micro_batch_size: got 24, allowed: a divisor of the 32 responses",
            "or more than that",
        ),
        (
            {"model__grpo__length_params__max_length": 64},
            "model.grpo.length_params.max_length: got 64, allowed: less than model.encoder_seq_length=64",
            "the prompt and the response",
        ),
        (
            {"model__optim__betas": [0.9]},
            "model.optim.betas: got [0.9], allowed: two numbers in [0, 1)",
            "such as [0.9, 0.98]",
        ),
        ({"model__sft__optim__betas": [0.9, 1.0]}, "model.sft.optim.betas: got [0.9, 1.0]", ""),
        (
            {"model__optim__name": "mcore_distributed_optim"},
            "model.sft.optim.name: got adam, allowed: mcore_distributed_optim, as model.optim.name",
            "",
        ),
        (
            {"model__optim__sched__min_lr": 1.0},
            "model.optim.sched.min_lr: got 1.0, allowed: at most model.optim.lr=3e-05",
            "",
        ),
        (
            {"model__tokenizer__library": "huggingface"},
            "model.tokenizer.type: got null, allowed: a tokenizer folder",
            "",
        ),
        (
            {"model__data__synthetic__min_digits": 4},
            "model.data.synthetic.min_digits: got 4, allowed: at most model.data.synthetic.max_digits=3",
            "",
        ),
        ({"model__data__prompt_template": "Q:"}, "model.data.prompt_template: got 'Q:'", "{question}"),
        ({"model__data__prompt_template": "{question} {answer}"}, "model.data.prompt_template: got", "{question}"),
        ({"model__data__prompt_template": "{question"}, "model.data.prompt_template: got '{question'", "{question}"),
    ],
)
def test_relations(bend, values, beginning, remedy):
    message = complaint(bend(**values))
    assert message.startswith(beginning)
    assert remedy in message


def test_every_monitored_value_is_a_number_of_the_validation(monkeypatch):
    from nemo_sspo.generation import SamplingParams
    from nemo_sspo.training import validation

    record = {"answer": 1.0, "format": 1.0, "think": False, "length": 3}
    monkeypatch.setattr(validation, "answer_problems", lambda *_: [record])
    written = validation.validate(None, [], None, SamplingParams(4, 1.0, 0), None, 0)
    assert {name for name in MONITORED if isinstance(written[name], float)} == set(MONITORED)


class TestWorldSize:
    def test_the_batch_must_divide_over_the_processes(self, bend):
        assert complaint(bend(), world_size=3) == (
            "model.global_batch_size: got 32, allowed: a multiple of the 3 data-parallel ranks (3 processes)"
        )

    def test_a_batch_is_shared_by_the_data_parallel_ranks_only(self, bend):
        split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "sequence_parallel": True}
        config = bend(**{f"model__{name}": value for name, value in split.items()})
        validate(config, 12)
        assert complaint(config, 18) == (
            "model.global_batch_size: got 32, allowed: a multiple of the 3 data-parallel ranks (18 processes / "
            "(model.tensor_model_parallel_size=2 x model.pipeline_model_parallel_size=3))"
        )

    def test_a_micro_batch_larger_than_a_process_share_is_one_piece(self, bend):
        validate(bend(), 2)
        message = complaint(bend(model__micro_batch_size=12), world_size=2)
        assert message.startswith("model.micro_batch_size: got 12, allowed: a divisor of the 16 responses")

    def test_cold_start_batch(self, bend):
        config = bend(model__micro_batch_size=8, model__sft__global_batch_size=63)
        assert complaint(config, 2).startswith("model.sft.global_batch_size: got 63, allowed: a multiple of ")
        config.trainer.sft.max_steps = 0
        validate(config, 2)

    def test_prompts(self, bend):
        config = bend(
            model__micro_batch_size=8,
            trainer__grpo__num_prompts_per_grpo_step=4,
            trainer__grpo__optimizer_steps_per_rollout=1,
            model__sft__global_batch_size=72,
            trainer__grpo__samples_per_prompt=18,
            model__global_batch_size=72,
        )
        assert complaint(config, 3).startswith("trainer.grpo.num_prompts_per_grpo_step: got 4, allowed: a multiple of ")

    def test_nodes_and_devices_are_for_torchrun_to_decide(self, bend):
        validate(bend(model__micro_batch_size=8, trainer__num_nodes=3, trainer__devices=7), 2)


class TestObjective:
    @pytest.mark.parametrize(
        ("values", "key"),
        [
            ({"name": "sspoo"}, "model.grpo.objective.name"),
            ({"gate": "atan"}, "model.grpo.objective.gate"),
            ({"advantages": "mean"}, "model.grpo.objective.advantages"),
            ({"tau_pos": -1.0}, "model.grpo.objective.tau_pos"),
            ({"clip_low": 0.2}, "model.grpo.objective.clip_low"),
            ({"name": "grpo", "gate": "siglog"}, "model.grpo.objective.gate"),
        ],
    )
    def test_bad_options_name_their_key(self, bend, values, key):
        values = {f"model__grpo__objective__{name}": value for name, value in values.items()}
        assert complaint(bend(**values)).startswith(f"{key}: ")

    def test_every_objective_and_gate_needs_only_its_name(self, bend):
        from nemo_sspo.objective import GATES, OBJECTIVES

        for name in OBJECTIVES:
            validate(bend(model__grpo__objective__name=name), 1)
        for gate in GATES:
            validate(bend(model__grpo__objective__gate=gate), 1)

    def test_the_schema_has_every_option(self):
        from nemo_sspo.objective.registry import COMMON_OPTIONS, OBJECTIVES

        options = {option for spec in OBJECTIVES.values() for option in spec.options}
        options |= COMMON_OPTIONS.keys() - {"check_finite"}  # the driver's own check stays on
        assert {field.name for field in dataclasses.fields(ObjectiveConfig)} == options | {"name"}
