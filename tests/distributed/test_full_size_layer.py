"""One layer of Qwen3-30B-A3B at its full size, out of a Hugging Face folder, cut for eight expert-parallel ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from nemo_sspo.config.hf import to_hf_config
from nemo_sspo.plan import Job, load_plan_config, stage_memory
from nemo_sspo.plan import Layout as PlannedLayout
from nemo_sspo.plan.activations import Batch
from tests.allocations import peak_bytes
from tests.distributed.launch import run_ranks

pytestmark = pytest.mark.distributed

RANKS, EXPERTS, HIDDEN, FFN, HEADS, GROUPS, HEAD = 8, 128, 2048, 768, 32, 4, 128
VOCAB = 1024  # of the real 151,936: every rank holds the embedding whole, which is not what is shown here
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, HIDDEN),
    "lm_head.weight": (VOCAB, HIDDEN),
    "model.norm.weight": (HIDDEN,),
    "model.layers.0.input_layernorm.weight": (HIDDEN,),
    "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
    "model.layers.0.self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
    "model.layers.0.self_attn.k_proj.weight": (GROUPS * HEAD, HIDDEN),
    "model.layers.0.self_attn.v_proj.weight": (GROUPS * HEAD, HIDDEN),
    "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
    "model.layers.0.self_attn.q_norm.weight": (HEAD,),
    "model.layers.0.self_attn.k_norm.weight": (HEAD,),
    "model.layers.0.mlp.gate.weight": (EXPERTS, HIDDEN),
} | {
    f"model.layers.0.mlp.experts.{expert}.{name}_proj.weight": (HIDDEN, FFN) if name == "down" else (FFN, HIDDEN)
    for expert in range(EXPERTS)
    for name in ("gate", "up", "down")
}  # fmt: skip
LARGEST = 2 * HEADS * HEAD * HIDDEN  # bytes of q_proj
BACK = ("model.layers.0.self_attn.", "experts.0.", "experts.77.", "experts.127.", "lm_head", "norm")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    save_file(tensors, folder / "model.safetensors")
    one_layer = ["model.num_layers=1", f"model.override_vocab_size={VOCAB}"]
    model = load_plan_config("qwen3_30b_a3b", one_layer).model
    (folder / "config.json").write_text(json.dumps(to_hf_config(model, VOCAB, "bfloat16")))
    return folder


def load(rank: int, size: int, folder: str) -> dict[str, Any]:
    """What this rank holds, what it took to get there and back, and whether it is what the file says."""
    from nemo_sspo.model import build_model
    from nemo_sspo.model.hf_weights import hf_tensors, load_hf_weights
    from nemo_sspo.training.convert import model_of
    from nemo_sspo.training.distributed import model_parallel_groups

    model, precision = model_of(Path(folder), ())
    model.expert_model_parallel_size = size
    with model_parallel_groups(model) as groups:
        policy = build_model(model, 0, groups, precision, draw=False)
        mapped = Path(folder, "model.safetensors").stat().st_size
        loading = peak_bytes(lambda: load_hf_weights(policy, folder)) - mapped
        weights = dict(policy.chunks[0].named_parameters())
        experts = [name for name in weights if ".experts." in name]
        own = EXPERTS // size
        with safe_open(f"{folder}/model.safetensors", "pt") as file:
            wrong = []
            for local in range(own):
                prefix = f"decoder.layers.0.mlp.experts.local_experts.{local}."
                theirs = f"model.layers.0.mlp.experts.{rank * own + local}."
                gate, up, down = (file.get_tensor(f"{theirs}{name}_proj.weight") for name in ("gate", "up", "down"))
                expected = {"linear_fc1.weight": torch.cat([gate, up]), "linear_fc2.weight": down}
                wrong += [n for n, value in expected.items() if not torch.equal(weights[prefix + n].detach(), value)]

            def bring_back() -> None:
                for name, tensor in hf_tensors(policy, skip=lambda name: not any(part in name for part in BACK)):
                    brought.append(name)
                    if not torch.equal(tensor, file.get_tensor(name)):
                        wrong.append(name)

            brought: list[str] = []
            bringing = peak_bytes(bring_back)
        return {
            "loading": loading,
            "bringing_back": bringing,
            "wrong": wrong,
            "brought": brought,
            "experts": len(experts),
            "bytes": sum(weight.numel() * weight.element_size() for weight in weights.values()),
            "planned": _planned(model, size),
        }


def _planned(model: Any, size: int) -> int:
    from nemo_sspo.config.schema import RunConfig

    batch = Batch(sequence=128, response=96, step=8, rollout=8, rows=1, element=2, attention="local")
    config = RunConfig(model=model)
    config.trainer.precision = "bf16"
    return stage_memory(Job(model, VOCAB, batch), PlannedLayout.of(config, size), 0).weights


def test_every_rank_holds_its_sixteen_experts_and_what_was_planned(folder, tmp_path):
    """Above its shard a rank takes at most 1.2 times the largest tensor, on the way in and on the way out."""
    for rank, held in enumerate(run_ranks(load, RANKS, tmp_path, str(folder), limit=300)):
        assert held["wrong"] == [], f"rank {rank}"
        assert held["experts"] == 2 * EXPERTS // RANKS
        assert held["bytes"] == held["planned"]
        assert 0 <= held["loading"] <= 1.2 * LARGEST
        assert LARGEST <= held["bringing_back"] <= 1.2 * LARGEST  # the largest does exist at some time
        assert len(held["brought"]) == len(set(held["brought"])) == sum(any(p in n for p in BACK) for n in SHAPES)
