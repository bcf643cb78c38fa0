"""Public recipes for Qwen3-30B-A3B fit, what nobody could run does not, and the order of the table."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_sspo.config import validate
from nemo_sspo.config.load import load_config
from nemo_sspo.plan import Layout, job_of, layout_memory, load_plan_config, memory_warning, possible_layouts, rank
from nemo_sspo.plan.memory import GIB
from nemo_sspo.plan.rates import GPUS

H100 = 80 * GIB
MODEL = "qwen3_30b_a3b"


def test_nemo_rl_on_32_h100():
    """NVIDIA-NeMo/RL, recipes/llm/performance/grpo-qwen3-30ba3b-4n8g.yaml: TP1 PP1 EP8, 4,096 tokens, micro-batch 1,
    an engine with TP2 on the same GPUs; the optimizer waits on the host meanwhile.
    """
    layout = Layout(gpus=32, ep=8, offload=True)
    job = job_of(load_plan_config(MODEL), generation_tp=2)
    held = layout_memory(job, layout)
    assert held.fits(H100)
    assert not held.fits(40 * GIB)
    assert not layout_memory(job, replace(layout, offload=False)).fits(H100)


@pytest.mark.parametrize("generation_tp", [None, 4])
@pytest.mark.parametrize("tokens", [4_096, 20_480])
def test_verl_on_16_h100(tokens, generation_tp):
    """verl's FP8 study of Qwen3-30B-A3B on 2 x 8 H100: TP4 PP2 EP8 ETP1, up to 20k tokens, the optimizer offloaded."""
    layout = Layout(gpus=16, tp=4, pp=2, ep=8, offload=True)
    config = load_plan_config(MODEL, [f"model.encoder_seq_length={tokens}"])
    assert layout_memory(job_of(config, generation_tp=generation_tp), layout).fits(H100)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_nothing_split_on_one_h100_does_not_fit(recompute):
    held = layout_memory(job_of(load_plan_config(MODEL)), Layout(recompute=recompute, offload=True))
    assert not held.fits(H100)
    assert held.peak > 5 * H100  # 16 bytes and more for each of 30.5 billion parameters


def test_recipes_are_among_the_possible_layouts():
    config = load_plan_config(MODEL)
    assert Layout(gpus=32, ep=8) in set(possible_layouts(config, 32))
    assert Layout(gpus=16, tp=4, pp=2, ep=8) in set(possible_layouts(config, 16))


FEW = ["trainer.grpo.num_prompts_per_grpo_step=2", "trainer.grpo.samples_per_prompt=64"]
ODD = ["trainer.grpo.num_prompts_per_grpo_step=4", "trainer.grpo.samples_per_prompt=3"]
ODD += ["model.global_batch_size=12", "trainer.grpo.optimizer_steps_per_rollout=1"]


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("tiny_moe_cpu", []),
        ("tiny_moe_cpu", FEW),  # two data-parallel ranks at most
        ("tiny_moe_cpu", ODD),  # three responses on each of four
        ("qwen3_8b", []),
        (MODEL, []),
    ],
)
def test_what_is_offered_a_run_starts_with(name, overrides):
    config = load_plan_config(name, overrides)
    offered = list(possible_layouts(config, 4, attention="local"))
    assert {one.recompute for one in offered} == {"none", "selective", "full"}
    for layout in offered:
        validate(layout.config(config), 4)
        assert Layout.of(layout.config(config), 4) == replace(layout, offload=True)


def test_best_first():
    config = load_plan_config(MODEL)
    plans = rank(job_of(config), possible_layouts(config, 16), GPUS["h100"], 80)
    fits = [plan.fits for plan in plans]
    assert fits == sorted(fits, reverse=True) and {True, False} == set(fits)
    times = [plan.time.total for plan in plans if plan.fits]
    assert times == sorted(times)
    peaks = [plan.memory.peak for plan in plans if not plan.fits]
    assert peaks == sorted(peaks)


def test_time_follows_the_rates():
    config = load_plan_config(MODEL)
    layout = Layout(gpus=16, tp=2, pp=2, ep=8)
    job = job_of(config)
    slow, fast = (rank(job, [layout], GPUS[name], 80)[0].time for name in ("h100", "b200"))
    assert slow.products / fast.products == pytest.approx(2250 / 989)
    again, eight_bits, offload = (
        rank(job, [replace(layout, **{key: value})], GPUS["h100"], 80)[0].time
        for key, value in (("recompute", "full"), ("fp8", True), ("offload", True))
    )
    assert again.products > 1.2 * slow.products
    assert eight_bits.products < slow.products
    assert offload.total > slow.total and slow.offload == 0


def test_products_are_those_of_the_active_parameters():
    """6 operations a token and parameter, of 3.03 billion without embedding; for the output one forward pass more."""
    config = load_plan_config(MODEL, ["model.encoder_seq_length=512", "model.grpo.length_params.max_length=511"])
    layout = Layout(gpus=1, micro_batch=8)
    seconds = rank(job_of(config), [layout], GPUS["h100"], 80)[0].time.products
    tokens = config.model.global_batch_size * 512
    least = 6 * 3.03e9 * tokens / (989e12 * 0.5)  # had experts the rate of large products, and attention no scores
    assert least < seconds < 2 * least


def test_warning_before_a_run_is_too_large():
    config = Layout(gpus=32, ep=8).config(load_plan_config(MODEL))
    assert memory_warning(config, 32, H100, attention="flash") is None
    warning = memory_warning(config, 32, 40 * GIB, attention="flash")
    assert warning is not None and "\n" not in warning
    assert "GiB a GPU in training, of 40.0 GiB" in warning and "nemo-sspo plan" in warning
    assert memory_warning(load_config("tiny_moe_cpu"), 1, H100) is None


def test_the_config_for_qwen3_has_the_planners_first_layout():
    config = load_plan_config("qwen3_30b_a3b_sspo")
    gpus = config.trainer.num_nodes * config.trainer.devices
    steps = config.trainer.grpo.optimizer_steps_per_rollout
    best = rank(job_of(config), possible_layouts(config, gpus, False, "flash"), GPUS["h100"], 80, steps)[0]
    assert best.fits
    assert Layout.of(config, gpus) == best.layout
