"""config.json read and written: every field is honoured, known to say nothing, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nemo_sspo.config.hf import read_hf_config, to_hf_config
from nemo_sspo.config.load import load_config
from nemo_sspo.config.schema import ModelConfig
from nemo_sspo.errors import UserError

# https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
SHAPE = {
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_query_groups": 4,
    "kv_channels": 128,
    "num_moe_experts": 128,
    "moe_router_topk": 8,
    "moe_router_pre_softmax": False,
    "moe_ffn_hidden_size": 768,
    "qk_layernorm": True,
    "add_qkv_bias": False,
    "layernorm_epsilon": 1e-6,
    "rotary_base": 1e6,
    "share_embeddings_and_output_weights": False,
    "override_vocab_size": 151936,
}
DENSE = {
    name: value
    for name, value in QWEN3_30B_A3B.items()
    if name not in ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
} | {"model_type": "qwen3"}


def write(folder: Path, fields: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_qwen3_30b_a3b(tmp_path):
    assert read_hf_config(write(tmp_path, QWEN3_30B_A3B)) == SHAPE


def test_newer_names_of_the_same_fields(tmp_path):
    fields = QWEN3_30B_A3B | {"num_local_experts": 128, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    del fields["num_experts"], fields["rope_theta"], fields["rope_scaling"]
    assert read_hf_config(write(tmp_path, fields)) == SHAPE


def test_a_dense_model_with_the_head_size_left_out(tmp_path):
    fields = DENSE | {"model_type": "qwen2"}
    del fields["head_dim"], fields["attention_bias"]
    shape = read_hf_config(write(tmp_path, fields))
    assert (shape["kv_channels"], shape["ffn_hidden_size"], shape["num_moe_experts"]) == (64, 6144, None)
    assert (shape["add_qkv_bias"], shape["qk_layernorm"]) == (True, False)
    assert "moe_router_topk" not in shape


@pytest.mark.parametrize("fields", [QWEN3_30B_A3B, QWEN3_30B_A3B | {"norm_topk_prob": False}, DENSE])
def test_written_and_read_again(tmp_path, fields):
    shape = read_hf_config(write(tmp_path, fields))
    model = ModelConfig(**shape, encoder_seq_length=4096)
    written = to_hf_config(model, 151936, "bfloat16")
    assert read_hf_config(write(tmp_path, written)) == shape
    assert written["architectures"] == [{"qwen3": "Qwen3ForCausalLM"}.get(fields["model_type"], "Qwen3MoeForCausalLM")]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, r"model_type: got 'llama', allowed: qwen3_moe, qwen3, qwen2"),
        ({"rope_scaling": {"type": "yarn"}}, r"rope_scaling: got .*yarn.*allowed: null"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, r"rope_parameters: got .*rope_type default"),
        ({"hidden_act": "gelu"}, r"hidden_act: got 'gelu', allowed: silu"),
        ({"use_sliding_window": True}, r"use_sliding_window: got True, allowed: false"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types: .*full_attention only"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers: got \[0\], allowed: none"),
        ({"decoder_sparse_step": 2}, r"decoder_sparse_step: got 2, allowed: 1"),
        ({"attention_bias": True}, r"attention_bias: got True, allowed: False"),
        ({"quantization_config": {"bits": 8}}, r"quantization_config: got .*which the builder does not know"),
        ({"logit_scale": 2.0}, r"logit_scale: got 2.0, which the builder does not know; it would be dropped"),
        ({"num_experts_per_tok": None}, r"no value for num_experts_per_tok"),
    ],
)
def test_a_field_that_is_not_honoured_is_refused_by_name(tmp_path, changes, message):
    with pytest.raises(UserError, match=r"config\.json: " + message):
        read_hf_config(write(tmp_path, QWEN3_30B_A3B | changes))


def test_what_is_no_config(tmp_path):
    with pytest.raises(UserError, match=r"config\.json: can't be read"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: not valid JSON"):
        read_hf_config(tmp_path)


def test_a_model_that_no_architecture_computes():
    model = ModelConfig(**SHAPE | {"qk_layernorm": False}, encoder_seq_length=64)
    with pytest.raises(UserError, match="no architecture of Hugging Face's library computes that"):
        to_hf_config(model, 100, "float32")


def test_a_run_takes_its_shape_from_the_pretrained_model(tmp_path):
    """Keys at their defaults are filled, a contradiction is refused."""
    (tmp_path / "own.yaml").write_text(
        "trainer: {grpo: {max_steps: 1}}\nexp_manager: {explicit_log_dir: x}\n"
        "model: {encoder_seq_length: 64, micro_batch_size: 1, global_batch_size: 32, optim: {lr: 1.0e-5},"
        " grpo: {length_params: {max_length: 8}}}\n"
        f"pretrained_checkpoint: {{restore_from_path: {write(tmp_path, QWEN3_30B_A3B)}}}\n"
    )
    model = load_config("own", config_dir=tmp_path).model
    assert {key: getattr(model, key) for key in SHAPE} == SHAPE
    with pytest.raises(UserError, match=r"model\.num_layers: got 3 \(from the override .*, but the model"):
        load_config("own", ["model.num_layers=3"], tmp_path)
