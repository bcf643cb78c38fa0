"""Every layout computes what a single process computes: loss, gradient norm, each gradient, weights, log-probs.

Float32, uneven prompts and responses, micro-batches of which the last is smaller; before and after three steps of Adam.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed.launch import run_ranks
from tests.distributed.layouts import LAYOUTS, STEPS, Layout, measure

pytestmark = pytest.mark.distributed

RELATIVE = 1e-5  # of the largest value of a tensor


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> dict[str, Any]:
    """One process."""
    return run_ranks(measure, 1, tmp_path_factory.mktemp("single"), LAYOUTS["single"])[0]


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "single"])
def test_equals_a_single_process(single, tmp_path, name):
    layout = LAYOUTS[name]
    result = run_ranks(measure, layout.processes, tmp_path, layout, limit=180)[0]
    assert same(result["weights_before"], single["weights_before"], 0.0) == []  # drawn alike, whatever the cut
    torch.testing.assert_close(result["loss"], single["loss"], rtol=RELATIVE, atol=0)
    torch.testing.assert_close(result["grad_norm"], single["grad_norm"], rtol=RELATIVE, atol=0)
    for kind in ("gradients_0", f"gradients_{STEPS}", "weights"):
        assert same(result[kind], single[kind], RELATIVE) == [], kind
    for kind in ("logprobs", "entropy"):
        for mine, theirs in zip(result[kind], single[kind], strict=True):
            torch.testing.assert_close(mine, theirs, rtol=RELATIVE, atol=RELATIVE)


def test_every_weight_is_compared(single):
    """79 tensors in 4 layers of 4 experts; all but the padding of the vocabulary have a gradient."""
    assert len(single["gradients_0"]) == 4 * (7 + 4 * 3) + 3
    assert all(bool(gradient.any()) for gradient in single["gradients_0"].values())


RECOMPUTE = {
    "selective": "model.activations_checkpoint_granularity=selective",
    "full": "model.activations_checkpoint_granularity=full,model.activations_checkpoint_method=uniform,"
    "model.activations_checkpoint_num_layers=1",
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
def test_recomputing_activations_changes_nothing(single, tmp_path, recompute):
    layout = LAYOUTS["tp2_ep2_pp2"]
    extra = tuple(RECOMPUTE[recompute].split(","))
    result = run_ranks(measure, layout.processes, tmp_path, layout, extra, limit=180)[0]
    for kind in ("gradients_0", f"gradients_{STEPS}", "weights"):
        assert same(result[kind], single[kind], RELATIVE) == [], kind


VARIANTS = {
    "tied": ("model.share_embeddings_and_output_weights=true",),
    "dense_biased": (
        *("model.num_moe_experts=null", "model.moe_router_topk=null", "model.moe_ffn_hidden_size=null"),
        *("model.ffn_hidden_size=48", "model.add_qkv_bias=true", "model.qk_layernorm=false"),
    ),
}
DENSE = {key: value for key, value in LAYOUTS["tp2_ep2_pp2"].keys.items() if "expert" not in key}


@pytest.mark.parametrize("variant", VARIANTS)
def test_other_models_equal_a_single_process_too(tmp_path, variant):
    """An embedding that the first and the last stage share; Qwen2.5's biased layers without experts."""
    single = run_ranks(measure, 1, tmp_path, LAYOUTS["single"], VARIANTS[variant])[0]
    layout = LAYOUTS["tp2_ep2_pp2"] if variant == "tied" else Layout(4, DENSE)
    result = run_ranks(measure, layout.processes, tmp_path, layout, VARIANTS[variant], limit=180)[0]
    torch.testing.assert_close(result["loss"], single["loss"], rtol=RELATIVE, atol=0)
    torch.testing.assert_close(result["grad_norm"], single["grad_norm"], rtol=RELATIVE, atol=0)
    for kind in ("gradients_0", f"gradients_{STEPS}"):
        assert same(result[kind], single[kind], RELATIVE) == [], kind
    # Biases begin at 0: they consist of Adam's steps, whose size hangs on the last digits of small gradients.
    assert same(result["weights"], single["weights"], 10 * RELATIVE) == []


def same(mine: dict[str, Tensor], theirs: dict[str, Tensor], relative: float) -> list[str]:
    """The names under which two sets of tensors differ by more than `relative` of the largest value."""
    assert mine.keys() == theirs.keys()
    return [
        f"{name}: {float((mine[name] - theirs[name]).abs().max()):.3g} of {float(theirs[name].abs().max()):.3g}"
        for name in theirs
        if not (mine[name] - theirs[name]).abs().max() <= relative * theirs[name].abs().max()
    ]
