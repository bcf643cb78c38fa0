"""The range of every single value: one table, read by `nemo_sspo.config.validate`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Rule(NamedTuple):
    """What a value must satisfy, in code and in words."""

    allowed: str
    holds: Callable[[Any], bool]


def _one_of(*names: str | None) -> Rule:
    return Rule(" or ".join(name or "null" for name in names), lambda value: value in names)


def _null_or(rule: Rule) -> Rule:
    return Rule(f"null or {rule.allowed}", lambda value: value is None or rule.holds(value))


AT_LEAST_1 = Rule(">= 1", lambda value: value >= 1)
AT_LEAST_2 = Rule(">= 2", lambda value: value >= 2)
AT_LEAST_0 = Rule(">= 0", lambda value: value >= 0)
ABOVE_0 = Rule("> 0", lambda value: value > 0)
FRACTION = Rule("between 0 and 1", lambda value: 0 <= value <= 1)

# Of validation.jsonl: what is a number in every record of it.
MONITORED = ("pass_at_1", "sampled_accuracy", "format", "think_fraction", "response_length/mean")

# rule, section, keys of that section, what to do
RANGES: tuple[tuple[Rule, str, str, str], ...] = (
    (AT_LEAST_1, "trainer", "num_nodes devices", "torchrun decides how many processes there are"),
    (_one_of("cpu", "gpu"), "trainer", "accelerator", ""),
    (_one_of("32", "bf16"), "trainer", "precision", ""),
    (AT_LEAST_1, "trainer.sft", "save_interval", "a value above max_steps saves only at the end"),
    (AT_LEAST_0, "trainer.sft", "max_steps", "0 leaves the cold start out"),
    (ABOVE_0, "trainer.sft", "gradient_clip_val", "a large value, such as 1e9, never clips"),
    (AT_LEAST_0, "trainer.grpo", "max_steps", "0 trains the cold start only"),
    (
        AT_LEAST_2,
        "trainer.grpo",
        "samples_per_prompt",
        "the advantage of a response is relative to the others of its group; a group of 1 has none",
    ),
    (AT_LEAST_1, "trainer.grpo", "num_prompts_per_grpo_step optimizer_steps_per_rollout generation_rollout_mbs", ""),
    (AT_LEAST_1, "trainer.grpo", "val_num_prompts_per_grpo_step", ""),
    (AT_LEAST_0, "trainer.grpo", "val_check_interval", "0 validates only before and after training"),
    (AT_LEAST_1, "trainer.grpo", "save_interval", "a value above max_steps saves only at the end"),
    (ABOVE_0, "trainer.grpo", "gradient_clip_val", "a large value, such as 1e9, never clips"),
    (AT_LEAST_1, "trainer.grpo", "max_skipped_steps", "a large value, such as 1000000, never stops for it"),
    (AT_LEAST_0, "trainer.grpo", "num_logged_samples", ""),
    (
        Rule("-1 or >= 1", lambda value: value == -1 or value >= 1),
        "exp_manager.checkpoint_callback_params",
        "save_top_k",
        "-1 keeps all checkpoints",
    ),
    (_one_of(None, *MONITORED), "exp_manager.checkpoint_callback_params", "monitor", "null keeps the newest only"),
    (_one_of("max", "min"), "exp_manager.checkpoint_callback_params", "mode", "it says which monitor is the best"),
    (
        _one_of("continue", "stop"),
        "exp_manager.checkpoint_callback_params",
        "on_error",
        "it says what follows when a checkpoint can't be written",
    ),
    (
        Rule("a folder", lambda value: value.strip() != ""),
        "exp_manager",
        "explicit_log_dir",
        "it is where the run is written; give it a folder of its own",
    ),
    (Rule(">= 0 and < 2**31", lambda value: 0 <= value < 2**31), "model", "seed", ""),
    (AT_LEAST_0, "model", "moe_aux_loss_coeff", ""),
    (AT_LEAST_1, "model", "num_layers hidden_size num_attention_heads num_query_groups", ""),
    (_null_or(AT_LEAST_1), "model", "num_moe_experts", "null is a model without experts"),
    (_null_or(AT_LEAST_1), "model", "moe_router_topk moe_ffn_hidden_size ffn_hidden_size override_vocab_size", ""),
    (
        Rule("even and >= 2", lambda value: value >= 2 and value % 2 == 0),
        "model",
        "kv_channels",
        "rotary embeddings turn the channels of a head in pairs",
    ),
    (ABOVE_0, "model", "layernorm_epsilon rotary_base init_method_std", ""),
    (AT_LEAST_1, "model", "make_vocab_size_divisible_by", "1 pads nothing"),
    (
        AT_LEAST_1,
        "model",
        "tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
        "expert_tensor_parallel_size context_parallel_size",
        "1 does not split",
    ),
    (_null_or(AT_LEAST_2), "model", "virtual_pipeline_model_parallel_size", "null is one model chunk on each stage"),
    (
        _one_of(None, "selective", "full"),
        "model",
        "activations_checkpoint_granularity",
        "null keeps all activations",
    ),
    (_one_of(None, "uniform", "block"), "model", "activations_checkpoint_method", ""),
    (_null_or(AT_LEAST_1), "model", "activations_checkpoint_num_layers", ""),
    (AT_LEAST_1, "model", "encoder_seq_length micro_batch_size global_batch_size", ""),
    (AT_LEAST_1, "model.sft", "global_batch_size", ""),
    (AT_LEAST_1, "model.grpo", "forward_micro_batch_size", ""),
    (_one_of("native"), "model.grpo.generation", "backend", ""),
    (
        _one_of("none", "R2", "R3"),
        "model.grpo.routing_replay",
        "mode",
        "R2 replays the experts of the old-log-prob pass in training, R3 those of the generation engine",
    ),
    (AT_LEAST_1, "model.grpo.length_params", "max_length", ""),
    (
        ABOVE_0,
        "model.grpo.sampling_params",
        "temperature",
        "temperature 0 is greedy decoding, under which all responses of a group are equal and nothing is learnt; "
        "greedy accuracy is what validation and nemo-sspo eval report",
    ),
    (
        Rule("0", lambda value: value == 0),
        "model.grpo.sampling_params",
        "top_k",
        "log-probabilities are taken over the full distribution, so training samples from all of it",
    ),
    (
        Rule("1.0", lambda value: value == 1),
        "model.grpo.sampling_params",
        "top_p",
        "log-probabilities are taken over the full distribution, so training samples from all of it",
    ),
    (_one_of("arithmetic", "huggingface"), "model.tokenizer", "library", ""),
    (AT_LEAST_1, "model.data.synthetic", "min_digits max_digits num_train num_validation num_test", ""),
    (FRACTION, "model.data.synthetic", "empty_think_even empty_think_odd missing_tag", "it is a share of the problems"),
    *(
        row
        for section in ("model.optim", "model.sft.optim")
        for row in (
            (_one_of("adam", "mcore_distributed_optim"), section, "name", ""),
            (ABOVE_0, section, "lr eps", ""),
            (AT_LEAST_0, section, "weight_decay", ""),
            (_one_of("CosineAnnealing", "Linear", "Constant"), f"{section}.sched", "name", ""),
            (AT_LEAST_0, f"{section}.sched", "warmup_steps min_lr", ""),
        )
    ),
)
