"""Transformer Engine's own layers against Megatron-Core's local ones, with the same weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_sspo.config.schema import OptimizerConfig
from nemo_sspo.generation import SamplingParams
from tests.distributed.layouts import gather, gradients, loss_of
from tests.tiny import VOCAB, tiny_config, uneven_batch

SIZES = (
    "model.kv_channels=64", "model.hidden_size=128", "model.init_method_std=0.05", "trainer.accelerator=gpu",
    "model.make_vocab_size_divisible_by=32",  # the id that stops, which nothing samples, is one of padding
)  # fmt: skip
SHAPES = {
    "experts": ("model.moe_ffn_hidden_size=64",),
    "dense": (
        "model.num_moe_experts=null", "model.moe_router_topk=null", "model.moe_ffn_hidden_size=null",
        "model.ffn_hidden_size=256", "model.moe_aux_loss_coeff=0", "model.add_qkv_bias=true",
        "model.qk_layernorm=false",
    ),
}  # fmt: skip
# Of log-probabilities, and of gradients over their largest value; products may run in TF32 on either side.
TOLERANCES = {"32": (2e-2, 5e-2), "bf16": (1e-1, 1e-1)}


def run(shape: str, precision: str, fused: bool) -> dict[str, Any]:
    """Log-probs of a batch, every gradient by global name, and the engine's own log-probs beside the actor's."""
    from nemo_sspo.generation.native import NativeEngine
    from nemo_sspo.model import build_model
    from nemo_sspo.model.weights import shards
    from nemo_sspo.training.actor import Actor
    from nemo_sspo.training.distributed import process_groups
    from tests.tiny import make_batch

    config = tiny_config(*SIZES, *SHAPES[shape], f"model.transformer_engine={str(fused).lower()}")
    batch, prompts = uneven_batch(4), [[3, 4, 5], [6], [7, 8, 9, 10]]
    with process_groups(config.model) as groups:
        policy = build_model(config.model, VOCAB, groups, precision)
        assert policy.config.transformer_impl == ("transformer_engine" if fused else "local")
        with torch.no_grad():
            for number, shard in enumerate(sorted(shards(policy.sharded_weights()), key=lambda shard: shard.key)):
                if shard.data is not None and shard.data.dim() == 1:  # norms and biases: not all alike
                    noise = torch.randn(shard.data.shape, generator=torch.Generator().manual_seed(number))
                    shard.data.add_(0.1 * noise.to(shard.data))
        actor = Actor(policy, 4, distributed_optimizer=False)
        actor.set_optimizer(OptimizerConfig(lr=0.0), clip_grad=1e9, total_steps=2)
        logprobs, _ = actor.logprobs(batch, 4)
        answers = NativeEngine(policy, 32, 2).generate(prompts, SamplingParams(8, 0.0, stop_id=VOCAB), range(3))
        own, _ = actor.logprobs(make_batch(prompts, [answer.token_ids for answer in answers]), 3)
        actor.step(batch, loss_of(batch))
        return {
            "logprobs": logprobs[batch.mask.bool()].cpu(),
            "gradients": {name: value.cpu() for name, value in gather(policy, gradients(actor)).items()},
            "generated": torch.tensor([answer.logprobs for answer in answers]),
            "again": own[:, :8].cpu(),
        }


@pytest.mark.parametrize("precision", TOLERANCES)
@pytest.mark.parametrize("shape", SHAPES)
def test_they_compute_what_local_layers_do(shape, precision):
    """Log-probabilities and every gradient; with a key-value cache the same as without."""
    from nemo_sspo.model.transformer_engine import why_not

    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    fused, local = run(shape, precision, True), run(shape, precision, False)
    of_logprobs, of_gradients = TOLERANCES[precision]
    assert (fused["logprobs"] - local["logprobs"]).abs().max() < of_logprobs
    assert (fused["generated"] - fused["again"]).abs().max() < of_logprobs
    assert fused["gradients"].keys() == local["gradients"].keys()
    for name, value in local["gradients"].items():
        difference = (fused["gradients"][name] - value).abs().max()
        assert difference <= of_gradients * value.abs().max() + 1e-4, name
