"""Models of Transformer Engine's layers, in a stand-in for them, are those of Megatron-Core's local layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import each, run_ranks
from tests.distributed.layouts import LAYOUTS, Layout, measure
from tests.distributed.test_checkpoint_layouts import trained
from tests.distributed.test_hf_weights import TOKENS, convert, hugging_faces_answers
from tests.distributed.test_routing_replay import replay
from tests.hf_models import make_model, save_model

FUSED = ("model.transformer_engine=true", "trainer.accelerator=gpu")  # which this model does not use
DENSE = (
    "model.num_moe_experts=null", "model.moe_router_topk=null", "model.moe_ffn_hidden_size=null",
    "model.ffn_hidden_size=48", "model.moe_aux_loss_coeff=0", "model.add_qkv_bias=true", "model.qk_layernorm=false",
)  # fmt: skip
MODELS = {"experts": (), "dense": DENSE}
CASES = [
    ("experts", "single"), ("experts", "tp2_sp"), ("experts", "tp2_ep2"), ("experts", "tp2_sp_etp2"),
    ("experts", "pp2_vpp2"), ("experts", "ep2_distopt"), ("dense", "single"), ("dense", "tp2_sp"),
]  # fmt: skip


def fused(name: str) -> Layout:
    return LAYOUTS[name]._replace(keys=LAYOUTS[name].keys | {"transformer_engine": True})


def measured(rank: int, size: int, cases: dict[tuple[str, str], tuple[str, ...]]) -> dict[tuple[str, str], Any]:
    return each({case: (rank, size, LAYOUTS[case[1]], extra) for case, extra in cases.items()}, measure)


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[Any, Any]:
    """By model and layout, with the fused layers; and by model, a single process with the local ones."""
    folder = tmp_path_factory.mktemp("ranks")
    local = {(model, "single"): extra for model, extra in MODELS.items()}
    found: dict[Any, Any] = {model: r for (model, _), r in run_ranks(measured, 1, folder, local)[0].items()}
    for size in (1, 2):
        cases = {(m, name): (*FUSED, *MODELS[m]) for m, name in CASES if LAYOUTS[name].processes == size}
        found |= run_ranks(measured, size, folder, cases, limit=120)[0]
    return found


@pytest.mark.parametrize(("model", "layout"), CASES)
def check_training_is_that_of_local_layers(results, model, layout):
    """Loss, norm, gradients, log-probs and weights over four steps; names too."""
    mine, expected = results[model, layout], results[model]
    for name in ("loss", "grad_norm"):
        assert mine[name] == pytest.approx(expected[name], rel=5e-5)  # Adam enlarges what another order of sums rounds
    for name in ("weights_before", "gradients_0", "gradients_3", "weights"):
        assert mine[name].keys() == expected[name].keys()
        for key, value in expected[name].items():
            atol = 0 if name == "weights_before" else 1e-7 + 1e-5 * float(value.abs().max())
            torch.testing.assert_close(mine[name][key], value, rtol=0, atol=atol, msg=lambda m, key=key: f"{key}: {m}")


def check_layers_are_transformer_engines(policy):
    """Those that the field trains with: fused norms, fused attention, one grouped multiplication for the experts."""
    (model,) = policy.chunks
    layer: Any = model.decoder.layers[0]
    kinds = [
        layer.input_layernorm, layer.self_attention.linear_qkv, layer.self_attention.core_attention,
        layer.self_attention.q_layernorm, layer.self_attention.linear_proj, layer.pre_mlp_layernorm,
        layer.mlp.experts, layer.mlp.experts.linear_fc1, layer.mlp.experts.linear_fc2, model.decoder.final_layernorm,
    ]  # fmt: skip
    assert [type(kind).__name__ for kind in kinds] == [
        "IdentityOp", "TELayerNormColumnParallelLinear", "TEDotProductAttention",
        "RMSNorm", "TERowParallelLinear", "RMSNorm",
        "TEGroupedMLP", "TEColumnParallelGroupedLinear", "TERowParallelGroupedLinear", "RMSNorm",
    ]  # fmt: skip
    assert type(layer.pre_mlp_layernorm).__module__.startswith("transformer_engine")


@pytest.mark.parametrize(("family", "layout"), [("qwen3_moe", "tp2_ep2"), ("qwen3", "tp2_sp"), ("qwen2", "tp2_sp")])
def check_hugging_faces_models(tmp_path, family, layout):
    folder = save_model(family, tmp_path)
    keys = {k: v for k, v in fused(layout).keys.items() if "expert" not in k or family == "qwen3_moe"}
    result = run_ranks(converted, 2, tmp_path, str(folder), Layout(2, keys), limit=120)[0]
    with torch.no_grad():
        assert (result["logits"] - make_model(family)(TOKENS).logits).abs().max() <= 1e-4
    assert result["answers"] == hugging_faces_answers(family)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == result["tensors"].keys()
    assert all(torch.equal(value, result["tensors"][name]) for name, value in stored.items())


def converted(rank: int, size: int, folder: str, layout: Layout) -> Any:
    return convert(folder, layout)


@pytest.mark.parametrize(("written", "read"), [("local", "fused"), ("fused", "local")])
def check_a_checkpoint_of_one_goes_on_with_the_other(tmp_path, written, read):
    layouts = {"local": LAYOUTS["tp2_ep2"], "fused": fused("tp2_ep2")}

    def run(kind: str, steps: range, start: Path | None, end: Path | None) -> Any:
        return run_ranks(trained, 2, tmp_path, layouts[kind], "32", steps, start, end, limit=120)[0]

    expected, _ = run(written, range(4), None, None)
    before, state = run(written, range(2), None, tmp_path / "checkpoints")
    after, resumed = run(read, range(2, 4), tmp_path / "checkpoints", None)
    torch.testing.assert_close(torch.tensor(before + after), torch.tensor(expected), rtol=1e-5, atol=0)
    assert resumed["loaded"].keys() == state["final"].keys()
    assert all(torch.equal(value, state["final"][name]) for name, value in resumed["loaded"].items())


@pytest.mark.parametrize("recompute", [False, True])
def check_routing_replay(tmp_path, recompute):
    keys = {
        "activations_checkpoint_granularity": "full", "activations_checkpoint_method": "uniform",
        "activations_checkpoint_num_layers": 1,
    }  # fmt: skip
    layout = fused("tp2_ep2")
    layout = layout._replace(keys=layout.keys | (keys if recompute else {}))
    for result in run_ranks(replayed, 2, tmp_path, layout, limit=120):
        assert max(result["unchanged"]) <= 1e-6
        assert result["others"] > 1e-2
        assert result["wrong"]["wrong"] == 0
        assert result["wrong"]["calls"] > 0
        assert result["natural_mismatch"] > 0


def replayed(rank: int, size: int, layout: Layout) -> Any:
    return replay(rank, layout)
