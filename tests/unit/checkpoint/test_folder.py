"""Checkpoints are whole, found in order, and refused when they do not fit."""

from __future__ import annotations

import pytest
import torch

from nemo_sspo.errors import UserError
from nemo_sspo.training.checkpoint import (
    Position,
    list_checkpoints,
    load_model,
    load_optimizer_state,
    read_checkpoint,
    save_checkpoint,
)

SHAPE = {"model.hidden_size": 4}


def save(folder, rollout: int, keep: int = -1, stage: str = "grpo", cold_start_step: int = 0, weight: float = 1.0):
    model = torch.nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.fill_(weight)
    position = Position(cold_start_step=cold_start_step, rollout=rollout, step=4 * rollout)
    return save_checkpoint(folder, position, stage, SHAPE, model, {"state": torch.tensor(3.0)}, keep)


def test_weights_optimizer_and_position_come_back(tmp_path):
    save(tmp_path, 5, weight=0.25)
    (found,) = list_checkpoints(tmp_path)
    model = torch.nn.Linear(2, 2)
    load_model(found, model, SHAPE)
    assert model.weight.tolist() == [[0.25, 0.25], [0.25, 0.25]]
    assert load_optimizer_state(found) == {"state": torch.tensor(3.0)}
    assert found.position == Position(rollout=5, step=20)


def test_the_newest_are_kept_and_order_is_by_progress(tmp_path):
    save(tmp_path, 0, stage="cold_start", cold_start_step=40)
    for rollout in (0, 9, 10, 100):
        save(tmp_path, rollout)
    names = [c.path.name for c in list_checkpoints(tmp_path)]
    assert names == ["cold_start_000040", "step_000000", "step_000009", "step_000010", "step_000100"]
    save(tmp_path, 101, keep=2)
    assert [c.path.name for c in list_checkpoints(tmp_path)] == ["step_000100", "step_000101"]


def test_a_half_written_checkpoint_is_not_taken_for_whole(tmp_path):
    save(tmp_path, 1)
    (tmp_path / ".step_000002.partial").mkdir()
    (tmp_path / ".step_000002.partial" / "state.json").write_text("{}")
    (tmp_path / "step_000003").mkdir()
    assert [c.path.name for c in list_checkpoints(tmp_path)] == ["step_000001"]


def test_another_model_is_refused_by_key(tmp_path):
    path = save(tmp_path, 1)
    model = torch.nn.Linear(2, 2)
    before = model.weight.detach().clone()
    with pytest.raises(UserError, match=r"model\.hidden_size was 4 and is 8"):
        load_model(read_checkpoint(path), model, {"model.hidden_size": 8})
    assert torch.equal(model.weight, before)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    path = save(tmp_path, 1)
    with pytest.raises(UserError, match="weight is missing, extra or of another shape"):
        load_model(read_checkpoint(path), torch.nn.Linear(3, 2), SHAPE)
    with pytest.raises(UserError, match="bias is missing, extra"):
        load_model(read_checkpoint(path), torch.nn.Linear(2, 2, bias=False), SHAPE)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_damage_is_named(tmp_path, name):
    path = save(tmp_path, 1)
    (path / name).write_bytes(b"damaged")
    checkpoint = read_checkpoint(path)
    with pytest.raises(UserError, match=name):
        load_model(checkpoint, torch.nn.Linear(2, 2), SHAPE)
        load_optimizer_state(checkpoint)


def test_an_unreadable_state_is_named(tmp_path):
    path = save(tmp_path, 1)
    (path / "state.json").write_text("{")
    with pytest.raises(UserError, match="step_000001: not a readable checkpoint"):
        read_checkpoint(path)
