"""A checkpoint of one layout goes on under another: weights and optimizer resharded, the loss the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import run_ranks
from tests.distributed.layouts import LAYOUTS, MICRO_BATCH, MODEL, ROWS, Layout, assemble, loss_of
from tests.tiny import VOCAB, tiny_config, uneven_batch

pytestmark = pytest.mark.distributed

SAVED, CONTINUED = 2, 2  # optimizer steps before and after the checkpoint

# written under -> read under
RESHARDINGS = [
    ("tp2_ep2_pp2", "single"),
    ("tp2_ep2_pp2", "ep4"),
    ("tp2_ep2_pp2", "ep2_distopt"),
    ("dp2_distopt", "pp2_vpp2"),
    ("dp2_distopt", "tp2_sp_etp2"),
]
PRECISIONS = ["32", "bf16"]
WRITTEN = sorted({written for written, _ in RESHARDINGS})


def trained(
    rank: int, size: int, layout: Layout, precision: str, steps: range, start: Path | None, end: Path | None
) -> Any:
    """Losses of `steps`, from a checkpoint in `start` and with one in `end` if given; what it held, on rank 0."""
    from nemo_sspo.checkpoint import Checkpoint, CheckpointSaver, Position, find_whole, load_training_state
    from nemo_sspo.config.resolve import shape_fields
    from nemo_sspo.config.schema import CheckpointConfig, OptimizerConfig
    from nemo_sspo.model import build_model
    from nemo_sspo.training.actor import Actor
    from nemo_sspo.training.distributed import model_parallel_groups

    seed = "model.seed=1" if start is None else "model.seed=2"  # what is loaded must not be there already
    config = tiny_config(*MODEL, *layout.overrides, seed)
    shape = shape_fields(config.model)
    with model_parallel_groups(config.model) as groups:
        policy = build_model(config.model, VOCAB, groups, precision)
        actor = Actor(policy, MICRO_BATCH, layout.distributed_optimizer)
        actor.set_optimizer(OptimizerConfig(lr=1e-3, eps=1e-5), clip_grad=1.0, total_steps=10)
        if start is not None:
            found = find_whole(start)
            assert found is not None
            load_training_state(found, policy, actor.optimizer, shape)
            actor.scheduler.step(increment=found.optimizer_steps)
        state = {"loaded": contents(policy, actor.optimizer)} if start is not None else {}
        batches = [uneven_batch(rows=ROWS, seed=step) for step in steps]
        results = [actor.step(batch, loss_of(batch)) for batch in batches]
        if end is not None:
            saver = CheckpointSaver(end, CheckpointConfig(on_error="stop"), print)
            position = Position(rollout=steps.stop, step=steps.stop)
            saver.save(
                Checkpoint(end, position, "grpo", shape, actor.scheduler.num_steps), policy, actor.optimizer, None
            )
        state["final"] = contents(policy, actor.optimizer)
    return [(r.loss, r.grad_norm, r.learning_rate) for r in results], state if rank == 0 else None


def contents(policy: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    """Everything that a checkpoint holds, whole and by global name."""
    from nemo_sspo.checkpoint.state import sharded_state

    return assemble(sharded_state(policy, optimizer))


def run(folder: Path, name: str, precision: str, steps: range, start: Path | None, end: Path | None) -> Any:
    layout = LAYOUTS[name]
    return run_ranks(trained, layout.processes, folder, layout, precision, steps, start, end, limit=120)[0]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Any:
    """What one process gives without a stop in between, by precision."""
    folder = tmp_path_factory.mktemp("whole")
    return {p: run(folder, "single", p, range(SAVED + CONTINUED), None, None) for p in PRECISIONS}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> Any:
    """Folder and outcome of the run up to the checkpoint, by layout and precision."""
    made = {}
    for name in WRITTEN:
        for precision in PRECISIONS:
            folder = tmp_path_factory.mktemp(f"{name}_{precision}")
            made[name, precision] = folder, run(folder, name, precision, range(SAVED), None, folder / "checkpoints")
    return made


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("written", "read"), RESHARDINGS, ids=[f"{a}-to-{b}" for a, b in RESHARDINGS])
def test_training_continues_under_another_layout(uninterrupted, checkpoints, tmp_path, written, read, precision):
    expected, weights = uninterrupted[precision]
    folder, (before, state) = checkpoints[written, precision]
    after, resumed = run(tmp_path, read, precision, range(SAVED, SAVED + CONTINUED), folder / "checkpoints", None)
    tolerance = 1e-5 if precision == "32" else 3e-2  # bfloat16 rounds otherwise in another order of sums
    torch.testing.assert_close(torch.tensor(before + after), torch.tensor(expected), rtol=tolerance, atol=0)
    for name, value in resumed["loaded"].items():
        assert torch.equal(value, state["final"][name]), f"{name} is not what was written"
    if precision == "32":
        for name, weight in weights["final"].items():
            limit = 1e-5 * float(weight.abs().max())
            torch.testing.assert_close(resumed["final"][name], weight, rtol=0, atol=limit, msg=name)


def test_the_same_layout_continues_bit_for_bit(checkpoints, tmp_path):
    whole, weights = run(tmp_path, "tp2_ep2_pp2", "32", range(SAVED + CONTINUED), None, None)
    folder, (before, _) = checkpoints["tp2_ep2_pp2", "32"]
    after, resumed = run(tmp_path, "tp2_ep2_pp2", "32", range(SAVED, SAVED + CONTINUED), folder / "checkpoints", None)
    assert before + after == whole
    assert all(torch.equal(resumed["final"][name], weight) for name, weight in weights["final"].items())
