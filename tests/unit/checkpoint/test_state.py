"""Loading: everything finds its place by name, under each kind of optimizer, or nothing is loaded at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from nemo_sspo.checkpoint import Checkpoint, find_whole, load_training_state, load_weights
from nemo_sspo.checkpoint.folder import SHARDS
from nemo_sspo.checkpoint.state import sharded_state
from nemo_sspo.errors import UserError
from nemo_sspo.model.weights import put_weights
from tests.distributed.layouts import assemble
from tests.unit.checkpoint.conftest import SHAPE, assert_equal, checkpoint, contents, step


@pytest.fixture
def save(make_saver, tmp_path):
    """Write a checkpoint of an actor, and find it."""

    def save_(actor: Any, optimizer: bool = True, **fields: Any) -> Checkpoint:
        saver = make_saver(on_error="stop")
        saver.save(checkpoint(actor, **fields), actor.policy, actor.optimizer if optimizer else None, None)
        found = find_whole(tmp_path / "checkpoints")
        assert found is not None
        return found

    return save_


def load_both(found: Checkpoint, actor: Any, shape: dict[str, Any] = SHAPE) -> None:
    load_training_state(found, actor.policy, actor.optimizer, shape)


def load_policy(found: Checkpoint, actor: Any, shape: dict[str, Any] = SHAPE) -> None:
    load_weights(found, actor.policy, shape)


LOADERS = pytest.mark.parametrize("load", [load_both, load_policy])

OTHER_SHAPES = [  # what the model at hand says of itself, what the message says
    (SHAPE | {"model.hidden_size": 64}, r"model\.hidden_size was 32 and is 64; set them back"),
    (
        SHAPE | {"model.num_layers": 3, "model.hidden_size": 64},
        r"model: model\.num_layers was 2 and is 3, model\.hidden_size was 32 and is 64;",
    ),
    (SHAPE | {"model.extra": 1}, r"model\.extra was None and is 1"),
    ({k: v for k, v in SHAPE.items() if k != "model.num_layers"}, r"model\.num_layers was 2 and is None"),
]


@LOADERS
@pytest.mark.parametrize(("shape", "message"), OTHER_SHAPES, ids=["one", "two", "new", "gone"])
def test_another_model_is_refused_by_key(make_actor, save, load, shape, message):
    actor, other = make_actor(seed=1), make_actor(seed=2)
    step(actor)
    found, before = save(actor), contents(other)
    with pytest.raises(UserError, match=message):
        load(found, other, shape)
    assert_equal(contents(other), before)


@LOADERS
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (3, r"decoder\.layers\.2\..* and \d+ more are in this model or optimizer, but not in the checkpoint"),
        (1, r"decoder\.layers\.1\..* and \d+ more are in the checkpoint, but not in this model or optimizer"),
    ],
    ids=["missing", "left_over"],
)
def test_names_without_a_counterpart(make_actor, save, load, layers, message):
    """The shape that both claim to have is the same."""
    actor, other = make_actor(seed=1), make_actor(f"model.num_layers={layers}", seed=2)
    step(actor)
    found = save(actor)
    before = {name: p.detach().clone() for name, p in other.policy.chunks[0].named_parameters()}
    with pytest.raises(UserError, match=message):
        load(found, other)
    for name, p in other.policy.chunks[0].named_parameters():
        assert torch.equal(p, before[name]), name


@LOADERS
def test_a_weight_of_another_size(make_actor, save, load):
    actor, other = make_actor(seed=1), make_actor("model.moe_ffn_hidden_size=24", seed=2)
    step(actor)
    with pytest.raises(UserError, match=r"shape mismatch .*24, 32.* key decoder\.layers\.0\.mlp\.experts\.experts"):
        load(save(actor), other)


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_checkpoint_without_the_optimizer_is_no_fresh_start(make_actor, save, precision, distributed_optimizer):
    options = {"precision": precision, "distributed_optimizer": distributed_optimizer}
    actor, other = make_actor(seed=1, **options), make_actor(seed=2, **options)
    found = save(actor, optimizer=False, optimizer_steps=3)
    before = {name: p.detach().clone() for name, p in other.policy.chunks[0].named_parameters()}
    with pytest.raises(
        UserError, match=r"optimizer\.state\..* more are in this model or optimizer, but not in the che"
    ):
        load_both(found, other)
    for name, p in other.policy.chunks[0].named_parameters():
        assert torch.equal(p, before[name]), name
    load_policy(found, other)  # the weights alone are there


CUTS = {  # what is done to the files of the shards
    "empty": lambda path: path.write_bytes(b""),
    "half": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "one_byte_short": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "gone": lambda path: path.unlink(),
}


@LOADERS
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("pattern", ["*.distcp", ".metadata"])
def test_a_damaged_shard(make_actor, save, load, cut, pattern):
    """Where the manifest was not asked, as when a file is harmed between the check and the reading."""
    actor, other = make_actor(seed=1), make_actor(seed=2)
    found = save(actor, optimizer_steps=0) if load is load_policy else save((step(actor), actor)[1])
    (path,) = (found.path / SHARDS).glob(pattern)
    CUTS[cut](path)
    with pytest.raises(UserError, match=r"shards: can't be read \(.*\); delete that checkpoint folder") as raised:
        load(found, other)
    assert "\n" not in str(raised.value)
    assert "CheckpointException" not in str(raised.value)  # PyTorch's wrapper, which tells nothing


@pytest.mark.parametrize("distributed_optimizer", [False, True])
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_weights_alone_from_a_checkpoint_with_an_optimizer(make_actor, save, precision, distributed_optimizer):
    options = {"precision": precision, "distributed_optimizer": distributed_optimizer}
    actor, other = make_actor(seed=1, **options), make_actor(seed=2, **options)
    step(actor)
    load_policy(save(actor), other)
    expected = dict(actor.policy.chunks[0].named_parameters())
    for name, p in other.policy.chunks[0].named_parameters():
        assert torch.equal(p, expected[name]), name


@pytest.mark.parametrize("precision", ["32", "bf16"])
@pytest.mark.parametrize("written", [False, True], ids=["from_plain", "from_distopt"])
def test_plain_and_distributed_optimizers_read_each_others(make_actor, save, precision, written):
    actor = make_actor(seed=1, precision=precision, distributed_optimizer=written)
    other = make_actor(seed=2, precision=precision, distributed_optimizer=not written)
    for i in range(3):
        step(actor, i)
    found = save(actor)
    load_both(found, other)
    other.scheduler.step(increment=found.optimizer_steps)
    loaded, expected = (assemble(sharded_state(a.policy, a.optimizer)) for a in (other, actor))
    assert sum(name.startswith("optimizer.state.exp_avg_sq.") for name in expected) > 10
    assert any(name.startswith("optimizer.state.fp32_param.") for name in expected) == (precision == "bf16")
    assert_equal(loaded, expected)
    for i in (3, 4):
        mine, theirs = step(other, i), step(actor, i)
        assert (mine.loss, mine.learning_rate) == pytest.approx((theirs.loss, theirs.learning_rate), rel=1e-6)
        assert mine.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-5)
    after, expected = (assemble(sharded_state(a.policy, a.optimizer)) for a in (other, actor))
    torch.testing.assert_close(after, expected, rtol=1e-5, atol=1e-7)


def test_another_precision(make_actor, save):
    """bfloat16's float32 weights are not in a float32 checkpoint, and the other way round."""
    actor, other = make_actor(seed=1), make_actor(seed=2, precision="bf16")
    step(actor)
    with pytest.raises(UserError, match=r"optimizer\.state\.fp32_param\..* but not in the checkpoint"):
        load_both(save(actor), other)


def test_names_are_global(make_actor, save):
    """They say nothing of how the model was cut or which optimizer wrote them."""
    seen = []
    for distributed_optimizer in (False, True):
        actor = make_actor(distributed_optimizer=distributed_optimizer)
        step(actor)
        seen.append(sorted(assemble(sharded_state(actor.policy, actor.optimizer))))
    assert seen[0] == seen[1]
    weights = [name for name in seen[0] if not name.startswith("optimizer.")]
    moments = [f"optimizer.state.{kind}.{name}" for kind in ("exp_avg", "exp_avg_sq") for name in weights]
    assert seen[0] == sorted(weights + moments)


def test_loaded_weights_are_all_that_the_model_has(make_actor):
    chunks = make_actor().policy.chunks
    whole = {name: value for name, value in chunks[0].state_dict().items() if "_extra_state" not in name}
    put_weights(chunks, {"model0": whole})
    name = "decoder.final_layernorm.weight"
    with pytest.raises(KeyError, match=f"without a counterpart: .*{name}"):
        put_weights(chunks, {"model0": {k: v for k, v in whole.items() if k != name}})
    with pytest.raises(KeyError, match=r"without a counterpart: .*decoder\.more"):
        put_weights(chunks, {"model0": whole | {"decoder.more": torch.zeros(1)}})
