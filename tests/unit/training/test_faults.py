"""Skipped steps: told, kept for a look, and not for ever."""

from __future__ import annotations

import math

import pytest
import torch

from nemo_sspo.errors import RunError
from nemo_sspo.training.actor import StepResult
from nemo_sspo.training.faults import SkippedSteps
from tests.tiny import uneven_batch


@pytest.fixture
def result() -> StepResult:
    return StepResult(math.nan, math.inf, 1e-3, torch.full((6, 7), math.nan), torch.ones(6, 7))


def test_a_skipped_step_is_told_and_kept(groups, tmp_path, capsys, result):
    batch = uneven_batch(6)
    SkippedSteps(tmp_path / "skipped", limit=3).record("step_000007", result, batch, in_row=2)
    path = tmp_path / "skipped" / "step_000007.pt"
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "Note: step_000007 is skipped: its loss is nan and its gradient norm inf; the weights are unchanged, the batch "
        f"is in {path}"
    )
    kept = torch.load(path, weights_only=True)
    assert math.isnan(kept.pop("loss"))
    assert kept.pop("grad_norm") == math.inf
    expected = vars(batch) | {"policy_logprobs": result.policy_logprobs, "entropy": result.entropy}
    torch.testing.assert_close(kept, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("limit", "in_row", "given_up"), [(1, 1, True), (3, 2, False), (3, 3, True), (3, 4, True)])
def test_too_many_in_a_row_end_the_run(groups, tmp_path, capsys, result, limit, in_row, given_up):
    skipped = SkippedSteps(tmp_path, limit)
    if given_up:
        message = (
            rf"step_000007 is skipped: .*: {in_row} such steps in a row, which is trainer\.grpo\.max_skipped_steps"
        )
        with pytest.raises(RunError, match=message) as raised:
            skipped.record("step_000007", result, uneven_batch(6), in_row)
        assert raised.value.status == 1
        assert str(tmp_path / "step_000007.pt") in str(raised.value)
    else:
        skipped.record("step_000007", result, uneven_batch(6), in_row)
    assert (tmp_path / "step_000007.pt").is_file()  # also the last one
    assert capsys.readouterr().err.startswith("Note: step_000007 is skipped")
