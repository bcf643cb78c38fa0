"""Sums of the planner, by hand on a model of two layers, and against published sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_sspo.plan import Job, Layout, layout_memory, load_plan_config, stage_memory
from nemo_sspo.plan.activations import Batch, in_flight, layer_bytes
from nemo_sspo.plan.memory import RESERVE
from nemo_sspo.plan.shape import Tensor, active_parameters, buffers, expert_parameters, parameter_count
from tests.tiny import VOCAB, tiny_config

MODEL = tiny_config().model  # hidden 32, 4 heads and 2 groups of 8, 4 experts of 16, 2 layers
ATTENTION = 32 * (4 + 2 * 2) * 8 + 4 * 8 * 32  # projection of queries, keys, values; of the output
EXPERT = 3 * 32 * 16
LAYER = 2 * 32 + ATTENTION + 2 * 8 + 4 * 32 + 4 * EXPERT  # norms, attention and its norms, router, experts
TABLE = VOCAB * 32
WHOLE = 2 * LAYER + 2 * TABLE + 32
BATCH = Batch(sequence=4, response=3, step=8, rollout=8, rows=2, element=4, attention="local")
JOB = Job(MODEL, VOCAB, BATCH)
PLAIN = Layout(distributed_optimizer=False, micro_batch=2)


# By the shapes of the published config.json files; the first is also the size that the model's card gives, 30.5B.
@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("qwen3_30b_a3b", 30_532_122_624),
        ("qwen3_8b", 8_190_735_360),
        ("qwen3_14b", 14_768_307_200),
        ("qwen2_5_7b", 7_615_616_512),
    ],
)
def test_models_have_their_published_size(name, count):
    model = load_plan_config(name).model
    assert model.override_vocab_size is not None
    assert parameter_count(model, model.override_vocab_size) == count


def test_parameters_of_a_whole_model():
    assert parameter_count(MODEL, VOCAB) == WHOLE
    assert parameter_count(MODEL, VOCAB - 7) == WHOLE  # the vocabulary is padded to a multiple of 8
    assert active_parameters(MODEL, Layout(ep=2)) == ATTENTION + 4 * 32 + 2 * EXPERT


def test_state_of_one_rank():
    held = stage_memory(JOB, PLAIN, 0)
    assert (held.weights, held.gradients, held.optimizer) == (4 * WHOLE, 4 * WHOLE, 8 * WHOLE)


def test_bf16_has_main_weights():
    held = stage_memory(Job(MODEL, VOCAB, replace(BATCH, element=2)), PLAIN, 0)
    assert (held.weights, held.gradients, held.optimizer) == (2 * WHOLE, 4 * WHOLE, 12 * WHOLE)


def test_parts_under_tensor_expert_and_pipeline_parallelism():
    layout = replace(PLAIN, gpus=4, tp=2, ep=2, pp=2)
    layer = 2 * 32 + ATTENTION // 2 + 2 * 8 + 4 * 32 + 2 * EXPERT
    assert stage_memory(JOB, layout, 0).gradients == 4 * (layer + TABLE // 2)
    assert stage_memory(JOB, layout, 1).gradients == 4 * (layer + TABLE // 2 + 32)
    assert expert_parameters(MODEL, layout) == 2 * EXPERT


def test_tied_embeddings_are_one_table_or_a_copy_on_the_last_stage():
    job = Job(replace(MODEL, share_embeddings_and_output_weights=True), VOCAB, BATCH)
    assert stage_memory(job, PLAIN, 0).weights == 4 * (WHOLE - TABLE)
    assert stage_memory(job, replace(PLAIN, gpus=2, pp=2), 1).weights == 4 * (LAYER + TABLE + 32)


def test_distributed_optimizer_pads_and_splits():
    """From the back: 100 at 0, 10 at 128, the end at 256; of two halves of 128 the first holds 100, the second 10."""
    (buffer,) = buffers([Tensor("a", 10), Tensor("b", 100)], Layout(gpus=2))
    assert (buffer.parameters, buffer.padded, buffer.largest_part) == (110, 256, 100)
    (whole,) = buffers([Tensor("a", 10), Tensor("b", 100)], Layout(gpus=2, distributed_optimizer=False))
    assert (whole.padded, whole.largest_part) == (110, 110)


def test_activations_of_a_layer_in_float32():
    tokens, copies = 2 * 4, 2 * 4 * 2
    norms = 2 * (2 * 4 * 32 + 4)
    attention = 4 * (32 + 32) + 4 * (2 * 32 + 2 * 16 + 32 + 16) + 4 * (4 + 2) + 3 * 4 * 32  # with norms of query, key
    router = 4 * 32 + 2 * (8 + 8 + 4) + 4 * (4 + 1)
    experts = 4 * 32 + 4 + 6 * 4 * 16
    once = 4 * 4 * 8 * 4 + 4 * (2 * 4 * 4 * 4) + 4 * 4  # rotary angles, scores, mask
    expected = tokens * (norms + attention + router) + copies * experts + once
    assert layer_bytes(MODEL, PLAIN, BATCH) == expected


def test_scores_are_quadratic_and_flash_has_none():
    def grown(attention: str) -> float:
        long, short = (replace(BATCH, sequence=n, attention=attention) for n in (40_000, 20_000))
        return layer_bytes(MODEL, PLAIN, long) / layer_bytes(MODEL, PLAIN, short)

    assert grown("flash") == pytest.approx(2.0)
    assert grown("local") == pytest.approx(4.0, rel=0.01)


@pytest.mark.parametrize(
    ("pp", "vpp", "micro_batches", "passes"),
    [(1, 1, 8, [1]), (4, 1, 8, [4, 3, 2, 1]), (4, 1, 2, [2, 2, 2, 1]), (2, 2, 4, [5, 3]), (2, 2, 2, [4, 3])],
)
def test_micro_batches_in_flight(pp, vpp, micro_batches, passes):
    assert [in_flight(Layout(gpus=pp, pp=pp, vpp=vpp), micro_batches, stage) for stage in range(pp)] == passes


def test_recomputing_keeps_less():
    long = Job(MODEL, VOCAB, replace(BATCH, sequence=64, response=48))
    kept = [layout_memory(long, replace(PLAIN, recompute=one)).activations for one in ("none", "selective", "full")]
    assert kept == sorted(kept, reverse=True)
    assert len(set(kept)) == 3


def test_key_value_cache_and_an_engines_weights():
    """Two rows of 4 tokens, keys and values of 2 groups of 8 in 2 layers; 28 bytes for each of their logits."""
    own = stage_memory(JOB, PLAIN, 0)
    assert (own.kv_cache, own.generation_weights) == (2 * 4 * 2 * 2 * 8 * 2 * 4 + 2 * VOCAB * 28, 0)
    engine = stage_memory(Job(MODEL, VOCAB, BATCH, generation_tp=2), replace(PLAIN, gpus=2), 0)
    assert engine.generation_weights == 4 * WHOLE // 2


def test_routes_of_a_micro_batch():
    held = stage_memory(Job(MODEL, VOCAB, BATCH, replay=True), PLAIN, 0)
    assert held.routes == 2 * 4 * 2 * (2 + 2)  # tokens, layers, two ids of a byte and two flags
    assert stage_memory(JOB, PLAIN, 0).routes == 0


def test_both_phases_and_offloading():
    kept, moved = (stage_memory(JOB, replace(PLAIN, offload=offload), 0) for offload in (False, True))
    assert kept.training == moved.training
    assert kept.generation - moved.generation == 8 * WHOLE
    assert kept.peak == max(kept.training, kept.generation)
    assert kept.fits((kept.peak + RESERVE) / 0.949)
    assert not kept.fits((kept.peak + RESERVE) / 0.951)


def test_explained_terms_add_up():
    held = layout_memory(JOB, PLAIN)
    kinds = ("weights", "gradients", "optimizer", "activations", "logits", "routes")
    terms = sum(term.bytes for term in held.terms if term.kind in kinds)
    assert round(terms) == held.training
    assert "= training" in held.explain() and "= generation" in held.explain()
