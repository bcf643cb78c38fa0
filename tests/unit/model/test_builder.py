"""The model is Qwen3-MoE-shaped, built from Megatron-Core's own layers, and the same for the same seed."""

from __future__ import annotations

import torch

from nemo_sspo.model import build_model, parameter_count
from tests.tiny import VOCAB, tiny_config


def test_parameters_are_those_of_the_shape(policy):
    # embedding and output, untied; by layer: qkv (q + k + v), q/k norms, proj, two norms, router, experts; final norm
    hidden, heads, query_groups, head, experts, ffn, layers = 32, 4, 2, 8, 4, 16, 2
    attention = hidden * head * (heads + 2 * query_groups) + 2 * head + heads * head * hidden
    moe = experts * hidden + experts * 3 * hidden * ffn
    assert parameter_count(policy) == 2 * VOCAB * hidden + layers * (attention + moe + 2 * hidden) + hidden


def test_layers_are_megatron_cores(policy):
    names = {type(m).__module__ for m in policy.modules()}
    assert not [n for n in names if n.startswith("nemo_sspo")]
    assert type(policy).__module__ == "megatron.core.models.gpt.gpt_model"


def test_router_probabilities_are_the_softmax_over_the_chosen(policy):
    router = policy.decoder.layers[0].mlp.router
    hidden = torch.randn(5, 1, 32)
    probs, chosen = router(hidden)
    logits = (hidden.view(5, 32) @ router.weight.T).detach()
    top = logits.topk(2)
    expected = torch.zeros(5, 4).scatter(1, top.indices, top.values.softmax(-1))
    torch.testing.assert_close(probs.detach(), expected, atol=1e-6, rtol=1e-6)
    assert chosen.sum(1).tolist() == [2] * 5


def test_the_seed_decides_the_weights(groups):
    def weights(seed: int) -> torch.Tensor:
        model = build_model(tiny_config(f"model.seed={seed}").model, VOCAB, groups)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_later_token_does_not_move_an_earlier_output(policy):
    policy.eval()
    tokens = torch.tensor([[3, 4, 5, 6]])
    positions = torch.arange(4)[None]
    with torch.no_grad():
        before = policy(tokens, positions, None)
        tokens[0, 3] = 9
        after = policy(tokens, positions, None)
    torch.testing.assert_close(before[:, :3], after[:, :3], atol=1e-6, rtol=1e-6)
    assert not torch.allclose(before[:, 3], after[:, 3])
