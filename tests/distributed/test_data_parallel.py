"""Two processes train as one does: the same rollouts, losses and gradient norms on the same global batches."""

from __future__ import annotations

import pytest

from tests.tiny_run import lines, train

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("replay", ["none", "R2", "R3"])
def test_two_processes_equal_one(tmp_path, replay):
    options = ("model.micro_batch_size=8", f"model.grpo.routing_replay.mode={replay}")
    train(tmp_path / "one", *options)
    train(tmp_path / "two", *options, processes=2)  # a share is one piece
    one, two = lines(tmp_path / "one" / "metrics.jsonl"), lines(tmp_path / "two" / "metrics.jsonl")
    assert len(one) == len(two) == 6
    for a, b in zip(one, two, strict=True):
        for key in ("loss/mean", "grad_norm", "reward/mean", "entropy/mean", "ratio/max", "gate_weight/mean"):
            assert b[key] == pytest.approx(a[key], rel=1e-5, abs=1e-6), (key, a["step"])
        if replay != "none":
            assert a["routing/replayed_fraction"] == b["routing/replayed_fraction"] == 1.0
            assert b["routing/mismatch_by_layer"] == pytest.approx(a["routing/mismatch_by_layer"], abs=5e-3)
            for key in ("routing/load_imbalance", "routing/bytes_per_token", "routing/live_tokens"):
                assert b[key] == pytest.approx(a[key], rel=1e-3)
    cold_one, cold_two = lines(tmp_path / "one" / "cold_start.jsonl"), lines(tmp_path / "two" / "cold_start.jsonl")
    for a, b in zip(cold_one, cold_two, strict=True):
        assert b["loss/mean"] == pytest.approx(a["loss/mean"], rel=1e-5)
        assert b["grad_norm"] == pytest.approx(a["grad_norm"], rel=1e-5)
    assert any(abs(a["loss/mean"]) > 1e-4 for a in one)  # else the comparison says little
    samples = [[s["response"] for s in lines(tmp_path / n / "samples.jsonl")] for n in ("one", "two")]
    assert samples[0] == samples[1]
