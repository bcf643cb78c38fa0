"""The model is Qwen3-MoE-shaped, built from Megatron-Core's own layers, and the same for the same seed."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_sspo.config.load import load_config
from nemo_sspo.model import (
    Policy,
    build_model,
    padded_vocab_size,
    parameter_count,
    sequence_multiple,
    transformer_config,
)
from nemo_sspo.model.layers import RMSNorm, mark_experts
from nemo_sspo.model.weights import shards
from tests.tiny import VOCAB, tiny_config


def build(groups, *overrides: str, vocab_size: int = VOCAB) -> Policy:
    return build_model(tiny_config(*overrides).model, vocab_size, groups)


def weights(policy: Policy) -> dict[str, Tensor]:
    """Every weight by its global name."""
    return {s.key: s.data.detach().clone() for s in shards(policy.sharded_weights()) if s.data is not None}


def goes_back(name: str) -> bool:
    """Whether a weight projects back into the residual stream."""
    return "linear_proj" in name or "linear_fc2" in name


def test_parameters_are_those_of_the_shape(policy):
    # embedding and output, untied; by layer: qkv (q + k + v), q/k norms, proj, two norms, router, experts; final norm
    hidden, heads, query_groups, head, experts, ffn, layers = 32, 4, 2, 8, 4, 16, 2
    attention = hidden * head * (heads + 2 * query_groups) + 2 * head + heads * head * hidden
    moe = experts * hidden + experts * 3 * hidden * ffn
    assert parameter_count(policy) == 2 * VOCAB * hidden + layers * (attention + moe + 2 * hidden) + hidden


def test_layers_are_megatron_cores(policy):
    (model,) = policy.chunks
    assert {type(m) for m in model.modules() if type(m).__module__.startswith("nemo_sspo")} == {RMSNorm}
    assert type(model).__module__ == "megatron.core.models.gpt.gpt_model"


def test_router_probabilities_are_the_softmax_over_the_chosen(policy):
    router = policy.chunks[0].decoder.layers[0].mlp.router
    hidden = torch.randn(5, 1, 32)
    probs, chosen = router(hidden)
    logits = (hidden.view(5, 32) @ router.weight.T).detach()
    top = logits.topk(2)
    expected = torch.zeros(5, 4).scatter(1, top.indices, top.values.softmax(-1))
    torch.testing.assert_close(probs.detach(), expected, atol=1e-6, rtol=1e-6)
    assert chosen.sum(1).tolist() == [2] * 5


@pytest.mark.parametrize(
    ("vocab_size", "multiple", "rows"),
    [(24, 8, 24), (25, 8, 32), (21, 8, 24), (1, 128, 128), (128, 128, 128), (129, 128, 256), (23, 1, 23)],
)
def test_padded_vocab_size_is_the_next_multiple(vocab_size, multiple, rows):
    model = tiny_config(f"model.make_vocab_size_divisible_by={multiple}").model
    assert padded_vocab_size(model, vocab_size) == rows
    model.tensor_model_parallel_size = 2
    assert padded_vocab_size(model, vocab_size) == rows  # alike in any layout


def test_embedding_and_output_layer_are_padded(groups):
    exact, padded = build(groups, vocab_size=VOCAB), build(groups, vocab_size=VOCAB - 3)
    assert (padded.vocab_size, parameter_count(padded)) == (VOCAB - 3, parameter_count(exact))
    wide = build(groups, vocab_size=VOCAB + 1)
    assert {len(w) for name, w in weights(wide).items() if "embedding" in name or "output_layer" in name} == {VOCAB + 8}
    assert parameter_count(wide) == parameter_count(exact) + 2 * 8 * 32


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "fp8", "multiple"),
    [
        (1, False, None, 1),
        (4, False, None, 1),
        (2, True, None, 2),
        (4, True, None, 4),
        (1, False, "hybrid", 16),
        (4, False, "hybrid", 16),
        (4, True, "hybrid", 64),
    ],
)
def test_sequence_multiple(tp, sequence_parallel, fp8, multiple):
    model = tiny_config().model
    model.tensor_model_parallel_size, model.sequence_parallel = tp, sequence_parallel
    config = transformer_config(model)
    config.fp8 = fp8
    assert sequence_multiple(config) == multiple


def test_the_seed_decides_the_weights(groups):
    one, same, other = (weights(build(groups, f"model.seed={seed}")) for seed in (1, 1, 2))
    assert one.keys() == same.keys() == other.keys()
    for name, weight in one.items():
        assert torch.equal(weight, same[name]), name
        assert torch.equal(weight, other[name]) == (weight.dim() == 1), name  # norms are 1 for any seed


def test_a_weight_is_that_of_its_name_in_a_deeper_model_too(groups):
    two, four = (weights(build(groups, f"model.num_layers={n}")) for n in (2, 4))
    assert len(four) > len(two) == len(two.keys() & four.keys())
    for name, weight in two.items():
        scale = math.sqrt(4 / 2) if goes_back(name) else 1.0
        torch.testing.assert_close(four[name] * scale, weight, rtol=1e-6, atol=1e-7, msg=name)


def test_no_two_weights_are_alike(groups):
    drawn = {name: w.flatten()[:64] for name, w in weights(build(groups)).items() if w.dim() > 1}
    names = list(drawn)
    for i, one in enumerate(names):
        for other in names[:i]:
            correlation = torch.corrcoef(torch.stack([drawn[one], drawn[other]]))[0, 1]
            assert abs(correlation) < 0.6, (one, other)


@pytest.mark.parametrize(("std", "layers"), [(0.2, 2), (0.02, 8)])
def test_weights_have_the_standard_deviation_asked_for(groups, std, layers):
    found = weights(build(groups, f"model.init_method_std={std}", f"model.num_layers={layers}"))
    assert {True, False} == {goes_back(name) for name in found}
    for name, weight in found.items():
        if weight.dim() == 1:
            assert (weight == 1).all(), name
            continue
        expected = std / math.sqrt(2 * layers) if goes_back(name) else std
        assert weight.std().item() == pytest.approx(expected, rel=4 / math.sqrt(2 * weight.numel())), name
        assert weight.mean().item() == pytest.approx(0, abs=4 * expected / math.sqrt(weight.numel())), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_rms_norm_is_pytorchs_with_megatrons_mark(dtype, sequence_parallel):
    config = transformer_config(tiny_config().model, {torch.float32: "32", torch.bfloat16: "bf16"}[dtype])
    config.sequence_parallel = sequence_parallel
    norm: Any = RMSNorm(config, hidden_size=8, eps=0.1)
    assert (norm.weight.dtype, norm.weight.sequence_parallel) == (dtype, sequence_parallel)
    with torch.no_grad():
        norm.weight.copy_(torch.arange(8.0))
    hidden = torch.randn(3, 8).to(dtype)
    wide = hidden.double()
    expected = wide / (wide.pow(2).mean(-1, keepdim=True) + 0.1).sqrt() * torch.arange(8.0)
    tolerance = 1e-6 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(norm(hidden).double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("ep", "expert_tp", "tp", "own_ranks"),
    [(1, 1, 1, False), (1, 2, 2, False), (1, 1, 2, True), (2, 1, 1, True), (2, 2, 2, True), (2, 1, 2, True)],
)
def test_experts_are_reduced_over_their_own_ranks_where_those_differ(policy, ep, expert_tp, tp, own_ranks):
    sizes = {"ep": ep, "expt_tp": expert_tp, "tp": tp}
    groups: Any = SimpleNamespace(**{name: SimpleNamespace(size=lambda n=n: n) for name, n in sizes.items()})
    before = {name: getattr(p, "allreduce", True) for name, p in policy.chunks[0].named_parameters()}
    assert all(before.values())  # what Megatron-Core says in a world of one
    mark_experts(policy.chunks, groups)
    found = {name: getattr(p, "allreduce", True) for name, p in policy.chunks[0].named_parameters()}
    assert found == {name: not (own_ranks and ".experts." in name) for name in before}


def test_a_later_token_does_not_move_an_earlier_output(policy):
    (model,) = policy.chunks
    model.eval()
    tokens = torch.tensor([[3, 4, 5, 6]])
    positions = torch.arange(4)[None]
    with torch.no_grad():
        before = model(tokens, positions, None)
        tokens[0, 3] = 9
        after = model(tokens, positions, None)
    torch.testing.assert_close(before[:, :3], after[:, :3], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(before[:, 3], after[:, 3])


@pytest.mark.slow
def test_qwen3_30b_a3b_has_its_published_number_of_parameters(groups):
    """The real shape, built without memory for it."""
    one = [f"model.{key}_parallel_size=1" for key in ("tensor_model", "pipeline_model", "expert_model")]
    config = load_config("qwen3_30b_a3b_sspo", [*one, "model.sequence_parallel=false"], read_pretrained=None)
    with torch.device("meta"):
        policy = build_model(config.model, 0, groups, "bf16", draw=False)
    assert sum(parameter.numel() for parameter in policy.chunks[0].parameters()) == 30_532_122_624
    assert all(parameter.is_meta for parameter in policy.chunks[0].parameters())
