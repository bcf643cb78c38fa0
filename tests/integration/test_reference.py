"""A divergence from the policy as it entered GRPO reaches the loss, and a resumed run has the same reference."""

from __future__ import annotations

import signal
import time

import pytest

from tests.tiny_run import lines, start, train, without_times

pytestmark = pytest.mark.slow

RECORDS = ("cold_start.jsonl", "metrics.jsonl", "validation.jsonl", "samples.jsonl")
# The policy moves far in three steps, and the divergence weighs as much as the rewards.
OPTIONS = ("model.grpo.objective.kl_coeff=0.1", "model.optim.lr=1e-2", "exp_manager.create_tensorboard_logger=false")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run with a divergence in its loss that went through without a break."""
    run_dir = tmp_path_factory.mktemp("runs") / "finished"
    train(run_dir, *OPTIONS)
    return run_dir


def test_the_divergence_is_in_the_loss(finished, tmp_path):
    records = lines(finished / "metrics.jsonl")
    kl = [r["kl/mean"] for r in records]
    assert kl[0] == pytest.approx(0, abs=1e-9)  # the policy is the reference
    assert all(value > 1e-6 for value in kl[1:])
    assert [p.name for p in (finished / "reference").iterdir()] == ["step_000000"]
    without = tmp_path / "without"
    train(without, *OPTIONS[1:])
    others = lines(without / "metrics.jsonl")
    assert not (without / "reference").exists()
    assert all("kl/mean" not in r for r in others)
    assert [r["reward/mean"] for r in others[:2]] == [r["reward/mean"] for r in records[:2]]
    assert others[0]["loss/mean"] == pytest.approx(records[0]["loss/mean"], abs=1e-9)
    # The first step had no divergence and no gradient of it, so the second is of the same policy in both runs. The
    # metric is a mean over tokens, the loss one over responses.
    assert records[1]["loss/mean"] - others[1]["loss/mean"] == pytest.approx(0.1 * kl[1], rel=0.3)


def test_a_stopped_run_goes_on_with_the_same_reference(finished, tmp_path):
    run_dir = tmp_path / "stopped"
    process = start(run_dir, *OPTIONS)
    deadline = time.monotonic() + 120
    while not (run_dir / "metrics.jsonl").exists() or not (run_dir / "metrics.jsonl").stat().st_size:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 75, out + err
    assert 1 <= len(lines(run_dir / "metrics.jsonl")) < len(lines(finished / "metrics.jsonl"))
    assert "resuming from step_" in train(run_dir, *OPTIONS).stdout
    for name in RECORDS:
        assert without_times(lines(run_dir / name)) == without_times(lines(finished / name)), name


def test_a_lost_reference_is_named(finished):
    """It is no part of the checkpoint: without it the run would be another."""
    reference = finished / "reference"
    reference.rename(finished / "elsewhere")
    try:
        result = train(finished, *OPTIONS, status=2)
    finally:
        (finished / "elsewhere").rename(reference)
    assert "the reference policy of this run is gone; restore it" in result.stderr
