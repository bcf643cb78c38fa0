"""Transformer Engine's own layers against Megatron-Core's local ones, with the same weights."""

from __future__ import annotations

import pytest
import torch

from nemo_sspo.config.schema import OptimizerConfig
from tests.tiny import VOCAB, tiny_config, uneven_batch

SHAPES = {
    "experts": ("model.kv_channels=64", "model.hidden_size=128", "model.moe_ffn_hidden_size=64"),
    "dense": (
        "model.kv_channels=64", "model.hidden_size=128", "model.num_moe_experts=null", "model.moe_router_topk=null",
        "model.moe_ffn_hidden_size=null", "model.ffn_hidden_size=256", "model.moe_aux_loss_coeff=0",
        "model.add_qkv_bias=true", "model.qk_layernorm=false",
    ),
}  # fmt: skip


@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_log_probabilities_and_gradients_are_those_of_local_layers(shape, precision):
    from nemo_sspo.model import build_model
    from nemo_sspo.model.transformer_engine import why_not
    from nemo_sspo.training.actor import Actor
    from nemo_sspo.training.distributed import process_groups

    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    batch = uneven_batch(4)

    def run(fused: str) -> tuple[torch.Tensor, float]:
        config = tiny_config(*SHAPES[shape], "model.init_method_std=0.05", f"model.transformer_engine={fused}")
        with process_groups(config.model) as groups:
            policy = build_model(config.model, VOCAB, groups, precision)
            assert policy.config.transformer_impl == ("transformer_engine" if fused == "true" else "local")
            actor = Actor(policy, 4, distributed_optimizer=False)
            actor.set_optimizer(OptimizerConfig(lr=1e-3), clip_grad=1e9, total_steps=2)
            logprobs, _ = actor.logprobs(batch, 4)
            outcome = actor.step(batch, lambda piece, new, entropy: -(new * piece.mask).sum() / batch.num_tokens)
            return logprobs, outcome.grad_norm

    (mine, norm), (local, local_norm) = run("true"), run("false")
    # float32 products run in TF32 on either side, and in another order
    tolerance = 2e-2 if precision == "32" else 1e-1
    assert (mine - local)[batch.mask.bool()].abs().max() < tolerance
    assert norm == pytest.approx(local_norm, rel=5e-2)
