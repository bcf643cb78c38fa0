"""Hugging Face's ``config.json`` as keys of the model's shape, and back.

A field that says how the model computes is read, or must have the one value that the builder computes; fields that say
nothing about that are left. A field that is in neither list is an error, so that none is dropped in silence.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from nemo_sspo.config.schema import ModelConfig
from nemo_sspo.errors import UserError


class Family(NamedTuple):
    """An architecture of Hugging Face's library."""

    architecture: str
    experts: bool
    qk_layernorm: bool
    add_qkv_bias: bool


FAMILIES = {
    "qwen3_moe": Family("Qwen3MoeForCausalLM", experts=True, qk_layernorm=True, add_qkv_bias=False),
    "qwen3": Family("Qwen3ForCausalLM", experts=False, qk_layernorm=True, add_qkv_bias=False),
    "qwen2": Family("Qwen2ForCausalLM", experts=False, qk_layernorm=False, add_qkv_bias=True),
}

# field -> key under ``model.``
_COMMON = {
    "hidden_size": "hidden_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_query_groups",
    "head_dim": "kv_channels",
    "rms_norm_eps": "layernorm_epsilon",
    "rope_theta": "rotary_base",
    "tie_word_embeddings": "share_embeddings_and_output_weights",
    "vocab_size": "override_vocab_size",
}
_EXPERTS = {
    "num_experts": "num_moe_experts",
    "num_experts_per_tok": "moe_router_topk",
    "moe_intermediate_size": "moe_ffn_hidden_size",
}
_DENSE = {"intermediate_size": "ffn_hidden_size"}

# field -> what it may be, in code and in words
_FIXED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "hidden_act": (lambda value: value == "silu", "silu"),
    "attention_dropout": (lambda value: not value, "0"),
    "rope_scaling": (lambda value: value is None, "null"),
    "use_sliding_window": (lambda value: not value, "false"),
    "layer_types": (lambda value: not value or set(value) == {"full_attention"}, "full_attention only"),
    "decoder_sparse_step": (lambda value: value == 1, "1, every layer has experts"),
    "mlp_only_layers": (lambda value: not value, "none, every layer has experts"),
    "mlp_bias": (lambda value: not value, "false"),
}
_SILENT = set(
    "_name_or_path architectures auto_map bos_token_id eos_token_id pad_token_id dtype torch_dtype initializer_range "
    "max_position_embeddings max_window_layers sliding_window model_type output_router_logits router_aux_loss_coef "
    "transformers_version use_cache chunk_size_feed_forward id2label label2id is_encoder_decoder output_attentions "
    "output_hidden_states problem_type return_dict".split()
)


def read_hf_config(folder: str | Path) -> dict[str, Any]:
    """The keys under ``model.`` that ``config.json`` in `folder` decides, with their values.

    Raises:
        UserError: no such file, another architecture, or a field that the builder does not honour.
    """
    path = Path(folder) / "config.json"
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{path}: can't be read; give the folder of a Hugging Face model") from None
    except ValueError as error:
        raise UserError(f"{path}: not valid JSON ({error}); download it again") from None
    if not isinstance(fields, dict) or fields.get("model_type") not in FAMILIES:
        given = fields.get("model_type") if isinstance(fields, dict) else type(fields).__name__
        raise UserError(f"{path}: model_type: got {given!r}, allowed: {', '.join(FAMILIES)}")
    family = FAMILIES[fields["model_type"]]
    fields = _flat_rope(fields, path) | {"num_experts": fields.get("num_experts", fields.get("num_local_experts"))}
    fields = {name: value for name, value in fields.items() if name != "num_local_experts" and value is not None}
    read = _COMMON | (_EXPERTS if family.experts else _DENSE)
    values = {key: fields.pop(name) for name, key in read.items() if name in fields}
    values |= {"qk_layernorm": family.qk_layernorm, "add_qkv_bias": family.add_qkv_bias}
    if family.experts:
        values["moe_router_pre_softmax"] = not fields.pop("norm_topk_prob", False)
        fields.pop("intermediate_size", None)  # of layers without experts: there is none
    else:
        values |= {"num_moe_experts": None}
    values.setdefault("kv_channels", values["hidden_size"] // values["num_attention_heads"])
    values.setdefault("share_embeddings_and_output_weights", False)
    values.setdefault("num_query_groups", values["num_attention_heads"])
    _check_fixed(fields, family, path)
    missing = sorted(set(read.values()) - values.keys())
    if missing:
        names = [name for name, key in read.items() if key in missing]
        raise UserError(f"{path}: no value for {', '.join(names)}; download it again")
    return values | {"rotary_base": float(values["rotary_base"])}


def to_hf_config(model: ModelConfig, vocab_size: int, dtype: str) -> dict[str, Any]:
    """The fields of ``config.json`` for a model of `vocab_size` rows, such that `read_hf_config` gives it back.

    Raises:
        UserError: no architecture of `FAMILIES` computes what this model does.
    """
    traits = (model.num_moe_experts is not None, model.qk_layernorm, model.add_qkv_bias)
    found = [(name, family) for name, family in FAMILIES.items() if family[1:] == traits]
    if not found:
        raise UserError(
            f"model.qk_layernorm={model.qk_layernorm} with model.add_qkv_bias={model.add_qkv_bias} and "
            f"model.num_moe_experts={model.num_moe_experts}: no architecture of Hugging Face's library computes that "
            f"({', '.join(family.architecture for family in FAMILIES.values())} were looked at)"
        )
    ((name, family),) = found
    read = _COMMON | (_EXPERTS if family.experts else _DENSE)
    fields = {field: getattr(model, key) for field, key in read.items()} | {"vocab_size": vocab_size}
    fields |= {"architectures": [family.architecture], "model_type": name, "dtype": dtype, "hidden_act": "silu"}
    fields |= {"max_position_embeddings": model.encoder_seq_length, "use_sliding_window": False}
    if family.experts:
        normalised = not model.moe_router_pre_softmax and model.moe_router_topk != 1
        fields |= {"norm_topk_prob": normalised, "decoder_sparse_step": 1, "mlp_only_layers": []}
    return fields


def _flat_rope(fields: dict[str, Any], path: Path) -> dict[str, Any]:
    """Newer files have ``rope_theta`` within ``rope_parameters``."""
    fields = dict(fields)
    rope = fields.pop("rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default" or set(rope) - {"rope_type", "rope_theta"}:
        raise UserError(f"{path}: rope_parameters: got {rope}, allowed: rope_type default, and rope_theta")
    return {"rope_theta": rope["rope_theta"]} | fields if "rope_theta" in rope else fields


def _check_fixed(fields: dict[str, Any], family: Family, path: Path) -> None:
    attention_bias = fields.pop("attention_bias", family.add_qkv_bias)
    if attention_bias != family.add_qkv_bias:
        raise UserError(f"{path}: attention_bias: got {attention_bias}, allowed: {family.add_qkv_bias}")
    for name, value in fields.items():
        holds, allowed = _FIXED.get(name, (lambda _: name in _SILENT, ""))  # noqa: B023  (called at once)
        if not holds(value):
            what = f"allowed: {allowed}" if allowed else "which the builder does not know; it would be dropped"
            raise UserError(f"{path}: {name}: got {value!r}, {what}")
