"""Every layout generates what a single process does, token for token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch

from nemo_sspo.generation import SamplingParams
from nemo_sspo.parallel.reductions import all_gather_list, local_share
from tests.distributed.launch import each, run_ranks
from tests.distributed.layouts import LAYOUTS, MODEL, Layout
from tests.tiny import VOCAB, tiny_config

pytestmark = pytest.mark.distributed

PADDED = "model.make_vocab_size_divisible_by=32"  # the rows from VOCAB on are padding, with weights like the others
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 2, 3, 4], [12, 13], [14, 15, 16, 17]]
STOP, BATCH_SIZE, LONGEST = 1, 2, 32
# Of five prompts a data-parallel rank has one batch or two, or one row or two; of one prompt all but a rank have none.
CASES = {
    "greedy": (PROMPTS, SamplingParams(12, 0.0, STOP)),
    "sampled": (PROMPTS, SamplingParams(20, 0.8, STOP, forbidden_ids=(0,))),
    "single_prompt": (PROMPTS[:1], SamplingParams(12, 1.0, STOP)),
}
NAMES = ["single", "tp2_sp", "pp2", "pp2_vpp2", "ep2", "ep2_etp2", "tp2_ep2", "tp2_ep2_pp2", "tp2_pp2_ep2_dp2"]
RUNS: dict[str, tuple[Layout, str]] = {name: (LAYOUTS[name], "32") for name in NAMES} | {
    # Stages whose experts are shared by pipelines with different prompts.
    "pp2_ep2_dp2": (Layout(4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}), "32"),
    "single_bf16": (LAYOUTS["single"], "bf16"),
    "pp2_vpp2_bf16": (LAYOUTS["pp2_vpp2"], "bf16"),
}


def generate_all(rank: int, size: int, layouts: dict[str, tuple[Layout, str]]) -> dict[str, dict[str, Any]]:
    """`generate` for one layout after another."""
    return each(layouts, generate)


def generate(layout: Layout, precision: str) -> dict[str, Any]:
    """The answers of all ranks by case, and this rank's training passes before and after."""
    from nemo_sspo.generation.native import NativeEngine
    from nemo_sspo.model import build_model
    from nemo_sspo.training.distributed import model_parallel_groups

    config = tiny_config(*MODEL, PADDED, *layout.overrides)
    with model_parallel_groups(config.model) as groups:
        policy = build_model(config.model, VOCAB, groups, precision)
        engine = NativeEngine(policy, LONGEST, BATCH_SIZE)
        result: dict[str, Any] = {"before": training_passes(policy)}
        for case, (prompts, sampling) in CASES.items():
            share = local_share(len(prompts), groups.dp_cp)
            answers = engine.generate(prompts[share], sampling, range(100, 100 + len(prompts))[share])
            result[case] = all_gather_list(answers, groups.dp_cp)
        result["after"] = training_passes(policy)
        result["sequence_parallel"] = policy.config.sequence_parallel
    return result


def training_passes(policy: Any) -> list[torch.Tensor]:
    """What each chunk makes of the same tokens, or of the same hidden states of the stage before it."""
    from nemo_sspo.model.builder import final_hidden_states

    config = policy.config
    tokens = torch.arange(8).view(2, 4)
    split = config.tensor_model_parallel_size if config.sequence_parallel else 1
    hidden = torch.randn(4 // split, 2, config.hidden_size, generator=torch.Generator().manual_seed(0))
    passes = []
    for chunk in policy.chunks:
        chunk.train()
        chunk.set_input_tensor(None if chunk.pre_process else hidden.to(config.pipeline_dtype))
        passes.append(final_hidden_states(chunk, chunk, tokens).detach())
    return passes


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Callable[[str], list[dict[str, Any]]]:
    """What every rank of a layout gives back."""

    @cache
    def of_size(size: int) -> list[dict[str, dict[str, Any]]]:
        layouts = {name: run for name, run in RUNS.items() if run[0].processes == size}
        return run_ranks(generate_all, size, tmp_path_factory.mktemp("ranks"), layouts, limit=180.0)

    return lambda name: [by_name[name] for by_name in of_size(RUNS[name][0].processes)]


@pytest.mark.parametrize("name", [name for name in RUNS if not name.startswith("single")])
def test_layout_generates_what_one_process_does(name, results):
    layout, precision = RUNS[name]
    (single,) = results("single" if precision == "32" else "single_bf16")
    for result in results(name):
        for case in CASES:
            for answer, expected in zip(result[case], single[case], strict=True):
                assert answer.token_ids == expected.token_ids, case
                assert answer.finished == expected.finished
                assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        assert result["sequence_parallel"] == ("sequence_parallel" in layout.keys)
        for before, after in zip(result["before"], result["after"], strict=True):
            assert torch.equal(before, after)


def test_cases_say_something(results):
    """Rows end at different steps, so that some ranks have to wait for others; no token is padding."""
    answers = results("single")[0]["sampled"]
    assert max(token for answer in answers for token in answer.token_ids) < VOCAB
    assert len({len(answer.token_ids) for answer in answers}) > 2
    assert {answer.finished for answer in answers} == {True, False}
