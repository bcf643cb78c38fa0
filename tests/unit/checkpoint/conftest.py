"""A small actor, what it consists of, and a checkpoint of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_sspo.checkpoint import Checkpoint, CheckpointSaver, Position
from nemo_sspo.config.resolve import shape_fields
from nemo_sspo.config.schema import CheckpointConfig, OptimizerConfig
from nemo_sspo.model import build_model
from nemo_sspo.training.actor import Actor, StepResult
from tests.tiny import VOCAB, tiny_config, uneven_batch

SHAPE = shape_fields(tiny_config().model)


@pytest.fixture
def make_actor(groups) -> Callable[..., Actor]:
    """An actor of the tiny model, its weights drawn from a seed of one's choice."""

    def make(*overrides: str, seed: int = 1, precision: str = "32", distributed_optimizer: bool = False) -> Actor:
        policy = build_model(tiny_config(f"model.seed={seed}", *overrides).model, VOCAB, groups, precision)
        actor = Actor(policy, 64, distributed_optimizer)
        actor.set_optimizer(OptimizerConfig(lr=1e-2), clip_grad=1.0, total_steps=10)
        return actor

    return make


@pytest.fixture
def make_saver(tmp_path) -> Callable[..., CheckpointSaver]:
    """A saver into ``tmp_path / "checkpoints"`` that says things to a list, `said`."""

    def make(**options: Any) -> CheckpointSaver:
        said: list[str] = []
        saver = CheckpointSaver(tmp_path / "checkpoints", CheckpointConfig(**options), said.append)
        saver.said = said  # type: ignore[attr-defined]
        return saver

    return make


def step(actor: Actor, seed: int = 0) -> StepResult:
    """One optimizer step on a batch of its own."""
    batch = uneven_batch(4, seed=seed)
    count = batch.num_tokens
    return actor.step(batch, lambda piece, logprobs, entropy: -(logprobs * piece.mask).sum() / count)


def checkpoint(actor: Actor, rollout: int = 1, **fields: Any) -> Checkpoint:
    """What a trainer would say of `actor` after some GRPO steps."""
    steps = fields.pop("optimizer_steps", actor.scheduler.num_steps)
    return Checkpoint(Path(), Position(rollout=rollout, step=steps), "grpo", SHAPE, steps, **fields)


def contents(actor: Actor) -> dict[str, torch.Tensor]:
    """Weights, float32 weights, moments and step counts, copied."""
    found: dict[str, torch.Tensor] = {f"weights/{n}": p for n, p in actor.policy.chunks[0].named_parameters()}
    for i, part in enumerate(getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])):
        for j, group in enumerate(part.optimizer.param_groups):
            for k, parameter in enumerate(group["params"]):
                found[f"{i}/{j}/{k}/main"] = parameter
                state = part.optimizer.state.get(parameter, {})
                found |= {f"{i}/{j}/{k}/{name}": torch.as_tensor(value) for name, value in state.items()}
    return {name: value.detach().clone() for name, value in found.items()}


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert value.dtype == found[name].dtype and torch.equal(value, found[name]), name
