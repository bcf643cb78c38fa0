"""Hugging Face's models in Megatron-Core under every kind of layout: the same logits, the same tokens, the way back."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from nemo_sspo.config.hf import read_hf_config
from nemo_sspo.generation import SamplingParams
from nemo_sspo.parallel.reductions import all_gather_list, all_gather_rows, local_share
from tests.distributed.launch import each, run_ranks
from tests.distributed.layouts import LAYOUTS, Layout
from tests.hf_models import MODELS, VOCAB, make_model, save_model

pytestmark = pytest.mark.distributed

CASES = {
    "qwen3_moe": ("single", "tp2_sp", "pp2", "ep2", "tp2_pp2_ep2"),
    "qwen3_moe_pre_softmax": ("single", "tp2_pp2_ep2"),
    "qwen3": ("single", "tp2_sp", "pp2", "tp2_pp2"),
    "qwen3_tied": ("single", "tp2_sp", "pp2", "tp2_pp2"),
    "qwen2": ("single", "tp2_sp", "pp2", "tp2_pp2"),
}
ALL = LAYOUTS | {
    "tp2_pp2_ep2": LAYOUTS["tp2_ep2_pp2"],
    "tp2_pp2": Layout(4, {k: v for k, v in LAYOUTS["tp2_ep2_pp2"].keys.items() if "expert" not in k}),
}
GENERATOR = torch.Generator().manual_seed(0)
TOKENS = torch.randint(0, VOCAB, (4, 12), generator=GENERATOR)
PROMPTS = [torch.randint(0, VOCAB, (1 + i % 7,), generator=GENERATOR).tolist() for i in range(20)]
NEW_TOKENS = 32


def converted(rank: int, size: int, folders: dict[str, str], cases: list[tuple[str, str]]) -> dict:
    """By case: the logits of `TOKENS`, greedy answers to `PROMPTS`, every tensor brought back."""
    return each({case: (folders[case[0]], ALL[case[1]]) for case in cases}, convert)


def convert(folder: str, layout: Layout) -> dict[str, Any]:
    from nemo_sspo.generation.native import NativeEngine
    from nemo_sspo.model import build_model
    from nemo_sspo.model.hf_weights import hf_tensors, load_hf_weights
    from nemo_sspo.training.convert import model_of
    from nemo_sspo.training.distributed import model_parallel_groups

    model, precision = model_of(Path(folder), ())
    for key, value in layout.keys.items():
        setattr(model, key, value == "true" if key == "sequence_parallel" else value)
    with model_parallel_groups(model) as groups:
        policy = build_model(model, 0, groups, precision)
        load_hf_weights(policy, folder)
        share = local_share(len(PROMPTS), groups.dp_cp)
        engine = NativeEngine(policy, 64, 20)
        sampling = SamplingParams(NEW_TOKENS, 0.0, stop_id=VOCAB)
        answers = engine.generate(PROMPTS[share], sampling, range(20)[share])
        return {
            "logits": all_gather_rows(logits(policy, TOKENS[local_share(len(TOKENS), groups.dp_cp)]), groups.dp_cp),
            "answers": all_gather_list([answer.token_ids for answer in answers], groups.dp_cp),
            "tensors": dict(hf_tensors(policy)) if torch.distributed.get_rank() == 0 else _drain(hf_tensors(policy)),
        }


def _drain(tensors: Any) -> None:
    for _ in tensors:
        pass


def logits(policy: Any, tokens: Tensor) -> Tensor:
    """``[B, S, V]`` through the pipeline, by way of the log-probs of every token there is."""
    from megatron.core.inference.contexts import StaticInferenceContext

    from nemo_sspo.generation.replica import Replica, generating

    seen: list[Tensor] = []

    def keep(scores: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(scores)
        return scores.argmax(-1), scores.amax(-1)

    columns = []
    with generating(policy.chunks):
        context = StaticInferenceContext(len(tokens), tokens.shape[1])
        for column in range(tokens.shape[1]):
            seen.clear()
            Replica(policy).next_tokens(context, tokens[:, column : column + 1], keep)
            last = torch.zeros(len(tokens), policy.vocab_size)
            if seen:
                last = seen[0]
            columns.append(last)
    result = torch.stack(columns, 1)
    torch.distributed.broadcast(
        result, group=policy.groups.mp, group_src=policy.groups.mp.size() - policy.groups.tp.size()
    )
    return result


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, str]:
    return {name: str(save_model(name, tmp_path_factory.mktemp(name))) for name in MODELS}


@pytest.fixture(scope="module")
def results(folders, tmp_path_factory) -> dict:
    """Family and layout -> what rank 0 gives back."""
    found: dict = {}
    for size in (1, 2, 4):
        cases = [(f, name) for f, layouts in CASES.items() for name in layouts if ALL[name].processes == size]
        found |= run_ranks(converted, size, tmp_path_factory.mktemp("ranks"), folders, cases, limit=240.0)[0]
    return found


PAIRS = [(family, layout) for family, layouts in CASES.items() for layout in layouts]


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_logits_are_hugging_faces(results, family, layout):
    with torch.no_grad():
        expected = make_model(family)(TOKENS).logits
    mine = results[family, layout]["logits"]
    assert (mine - expected).abs().max() <= 1e-4
    assert expected.std() > 0.5


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_greedy_tokens_are_hugging_faces(results, family, layout):
    assert results[family, layout]["answers"] == hugging_faces_answers(family)


@cache
def hugging_faces_answers(family: str) -> list[list[int]]:
    model = make_model(family)
    model.generation_config.eos_token_id = None
    answers = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        theirs = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0
        )
        answers.append(theirs[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize(("family", "layout"), PAIRS)
def test_the_way_back_is_bit_for_bit(results, folders, family, layout):
    mine, theirs = results[family, layout]["tensors"], load_file(f"{folders[family]}/model.safetensors")
    assert list(mine) == sorted(theirs)
    for name, tensor in theirs.items():
        assert torch.equal(mine[name], tensor), name


def test_every_key_of_a_config_was_read(folders):
    assert read_hf_config(folders["qwen3"])["rotary_base"] == 1e6
    assert read_hf_config(folders["qwen3_tied"])["share_embeddings_and_output_weights"]
