"""Adam's moments in host memory while a GPU generates."""

from __future__ import annotations

import pytest
import torch

from nemo_sspo.config.schema import OptimizerConfig
from tests.tiny import VOCAB, tiny_config, uneven_batch


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_moments_leave_the_gpu_and_come_back(distributed_optimizer):
    from nemo_sspo.model import build_model
    from nemo_sspo.training.actor import Actor
    from nemo_sspo.training.distributed import process_groups

    config = tiny_config()
    with process_groups(config.model) as groups:
        actor = Actor(build_model(config.model, VOCAB, groups, "bf16"), 4, distributed_optimizer)
        actor.set_optimizer(OptimizerConfig(lr=1e-2), clip_grad=1.0, total_steps=10)
        batch = uneven_batch(4)
        count = batch.num_tokens

        def step() -> float:
            return actor.step(batch, lambda piece, logprobs, entropy: -(logprobs * piece.mask).sum() / count).loss

        def moments() -> list[torch.Tensor]:
            parts = getattr(actor.optimizer, "chained_optimizers", [actor.optimizer])
            states = [state for part in parts for state in part.optimizer.state.values()]
            return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]

        step()
        before = [value.clone() for value in moments()]
        assert before
        assert {value.device.type for value in before} == {"cuda"}
        with actor.optimizer_state_in_host_memory():
            assert {value.device.type for value in moments()} == {"cpu"}
        assert {value.device.type for value in moments()} == {"cuda"}
        assert all(torch.equal(*pair) for pair in zip(moments(), before, strict=True))
        assert step() < float("inf")
