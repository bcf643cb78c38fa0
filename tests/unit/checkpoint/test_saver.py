"""Saving: all of it bit for bit, at once or beside the training; a failure leaves the last good checkpoint."""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_sspo.checkpoint import find_whole, list_checkpoints, load_training_state, load_weights
from nemo_sspo.checkpoint import folder as files
from nemo_sspo.errors import RunError
from tests.unit.checkpoint.conftest import SHAPE, assert_equal, checkpoint, contents, step

KINDS = {  # precision, distributed optimizer
    "32": ("32", False),
    "32_distopt": ("32", True),
    "bf16": ("bf16", False),
    "bf16_distopt": ("bf16", True),
}


def names(folder: Path) -> list[str]:
    """Everything in a folder, hidden or not."""
    return sorted(p.name for p in folder.iterdir())


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """No file can grow beyond `limit` bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("async_save", [False, True], ids=["at_once", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_as_if_nothing_had_been(make_actor, make_saver, tmp_path, kind, async_save):
    precision, distributed_optimizer = KINDS[kind]
    options: dict[str, Any] = {"precision": precision, "distributed_optimizer": distributed_optimizer}
    actor, saver = make_actor(seed=1, **options), make_saver(async_save=async_save)
    for i in range(3):
        step(actor, i)
    saver.save(checkpoint(actor, score=0.5), actor.policy, actor.optimizer, None)
    saver.finish()
    found = find_whole(tmp_path / "checkpoints")
    assert found == replace(checkpoint(actor, score=0.5), path=tmp_path / "checkpoints" / "step_000001")
    other = make_actor(seed=2, **options)
    assert not torch.equal(*(a.policy.chunks[0].output_layer.weight for a in (actor, other)))
    step(other, 7)  # moments of its own, which must not remain
    load_training_state(found, other.policy, other.optimizer, SHAPE)
    other.scheduler.num_steps = 0
    other.scheduler.step(increment=found.optimizer_steps)
    expected = contents(actor)
    assert sum("exp_avg" in name for name in expected) > 20
    assert_equal(contents(other), expected)
    for i in (3, 4):
        mine, theirs = step(other, i), step(actor, i)
        for name, value in vars(theirs).items():
            same = torch.equal(getattr(mine, name), value) if torch.is_tensor(value) else getattr(mine, name) == value
            assert same, name
        assert_equal(contents(other), contents(actor))
    assert saver.said == []


def test_what_is_in_the_folder(make_actor, make_saver, tmp_path):
    actor, saver = make_actor(), make_saver()
    step(actor)
    saver.save(checkpoint(actor), actor.policy, actor.optimizer, None)
    path = tmp_path / "checkpoints" / "step_000001"
    assert names(path) == ["manifest.json", "shards", "state.json"]
    assert files.check_files(path) == []
    described = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {"manifest.json"}
    for name in described:
        (path / name).write_bytes((path / name).read_bytes() + b"!")
    assert len(files.check_files(path)) == len(described) >= 4  # all files are in the manifest


KEEP = [  # options, scores of the steps 1, 2, ..., steps kept
    ({"save_top_k": 2}, [0.1, 0.2, 0.3, 0.4, 0.5], [4, 5]),
    ({"save_top_k": 2}, [0.1, 0.9, 0.3, 0.4, 0.5], [2, 4, 5]),
    ({"save_top_k": 2}, [0.1, 0.9, 0.9, 0.4, 0.5], [3, 4, 5]),
    ({"save_top_k": 1}, [None, None, None], [3]),
    ({"save_top_k": 1}, [0.1, None, None], [1, 3]),
    ({"save_top_k": 1, "mode": "min"}, [0.3, 0.1, 0.2, 0.4], [2, 4]),
    ({"save_top_k": 1, "monitor": None}, [0.9, 0.1, 0.2], [3]),
    ({"save_top_k": -1}, [0.9, 0.1, None, 0.2], [1, 2, 3, 4]),
]


@pytest.mark.parametrize(("options", "scores", "kept"), KEEP)
def test_the_newest_and_the_best_are_kept(make_actor, make_saver, tmp_path, options, scores, kept):
    actor, saver = make_actor(), make_saver(**options)
    for i, score in enumerate(scores, start=1):
        saver.save(checkpoint(actor, i, score=score), actor.policy, None, None)
        assert (tmp_path / "checkpoints" / f"step_{i:06d}").exists()
    assert names(tmp_path / "checkpoints") == [f"step_{i:06d}" for i in kept]


def test_a_second_save_of_the_same_name_replaces_the_first(make_actor, make_saver, tmp_path):
    actor, saver = make_actor(), make_saver()
    saver.save(checkpoint(actor), actor.policy, None, {"seconds": 1.0})
    step(actor)
    saver.save(checkpoint(actor, score=0.5), actor.policy, actor.optimizer, None)
    assert names(tmp_path / "checkpoints") == ["step_000001"]
    found, other = find_whole(tmp_path / "checkpoints"), make_actor(seed=2)
    assert found is not None
    assert found.score == 0.5
    assert "rollout.pt" not in names(found.path)
    load_training_state(found, other.policy, other.optimizer, SHAPE)
    assert_equal(contents(other), contents(actor))


@pytest.mark.parametrize("distributed_optimizer", [False, True])
def test_async_training_goes_on_and_what_is_written_does_not(make_actor, make_saver, tmp_path, distributed_optimizer):
    options = {"distributed_optimizer": distributed_optimizer}
    actor, saver = make_actor(**options), make_saver(async_save=True)
    step(actor)
    saved, made = contents(actor), checkpoint(actor)
    go_on = hold(saver)
    saver.save(made, actor.policy, actor.optimizer, None)
    for i in (1, 2, 3):
        step(actor, i)
        saver.poll()
    assert names(tmp_path / "checkpoints") == [".step_000001.partial"]  # not a name yet
    assert list_checkpoints(tmp_path / "checkpoints") == []
    pending = saver._pending
    assert pending is not None
    go_on()
    pending.writer.join()
    assert names(tmp_path / "checkpoints") == [".step_000001.partial"]
    saver.poll()
    assert names(tmp_path / "checkpoints") == ["step_000001"]
    found, other = find_whole(tmp_path / "checkpoints"), make_actor(seed=2, **options)
    assert found is not None
    load_training_state(found, other.policy, other.optimizer, SHAPE)
    assert_equal(contents(other), saved)
    for finish in (saver.poll, saver.finish):
        finish()  # there is nothing left to do
    assert names(tmp_path / "checkpoints") == ["step_000001"]


def hold(saver: Any) -> Any:
    """Make the saver's writer wait for a call of what this returns."""
    event, start = threading.Event(), saver._start

    def held_start(partial: Any, request: Any) -> Any:
        write = request.async_fn

        def wait_and_write(*arguments: Any) -> None:
            assert event.wait(60)
            write(*arguments)

        return start(partial, request._replace(async_fn=wait_and_write))

    saver._start = held_start
    return event.set


def test_a_save_waits_for_the_one_before(make_actor, make_saver, tmp_path):
    actor, saver = make_actor(), make_saver(async_save=True)
    for i in (1, 2):
        saver.save(checkpoint(actor, i), actor.policy, None, None)
    assert (tmp_path / "checkpoints" / "step_000001").is_dir()
    saver.finish()
    assert names(tmp_path / "checkpoints") == ["step_000001", "step_000002"]


@pytest.mark.parametrize("limit", [0, 1000, 60_000], ids=["nothing", "state_alone", "little"])
@pytest.mark.parametrize("async_save", [False, True], ids=["at_once", "async"])
@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_a_full_disk(make_actor, make_saver, tmp_path, on_error, async_save, limit):
    actor, saver = make_actor(), make_saver(on_error=on_error, async_save=async_save)
    step(actor)
    saver.save(checkpoint(actor, 1), actor.policy, actor.optimizer, None)
    saver.finish()
    good = tmp_path / "checkpoints" / "step_000001"
    before = bytes_of(good)
    assert max(map(len, before.values())) > 60_000

    def save_on_a_full_disk() -> None:
        with full_disk(limit):
            saver.save(checkpoint(actor, 2), actor.policy, actor.optimizer, None)
            saver.finish()

    if on_error == "stop":
        with pytest.raises(RunError) as raised:
            save_on_a_full_disk()
        assert raised.value.status == 1
        message = str(raised.value)
        assert "run the same command again" in message
    else:
        save_on_a_full_disk()
        (message,) = saver.said
        assert message.endswith("Training goes on")
    assert message.startswith("checkpoint step_000002 can't be written (")
    assert "File too large" in message
    assert "the last good one is step_000001" in message
    assert "\n" not in message
    assert bytes_of(good) == before
    assert names(tmp_path / "checkpoints") == ["step_000001"]
    saver.save(checkpoint(actor, 3), actor.policy, actor.optimizer, None)
    saver.finish()
    assert names(tmp_path / "checkpoints") == ["step_000001", "step_000003"]
    found = find_whole(tmp_path / "checkpoints")
    assert found is not None
    assert found.name == "step_000003"


def test_a_full_disk_with_none_before(make_actor, make_saver, tmp_path):
    actor, saver = make_actor(), make_saver()
    with full_disk(10_000):
        saver.save(checkpoint(actor), actor.policy, None, None)
    (message,) = saver.said
    assert "there is none before it" in message
    assert names(tmp_path / "checkpoints") == []


def test_a_full_disk_at_the_rollout(make_actor, make_saver, tmp_path):
    """It is written by other code than the shards, with errors of its own."""
    actor, saver = make_actor(), make_saver()
    saver.save(checkpoint(actor, 1), actor.policy, None, None)
    with full_disk(100_000):
        rollout = {"rollout": {"tokens": torch.zeros(50_000, dtype=torch.int64)}}
        saver.save(checkpoint(actor, 1, in_flight=True), actor.policy, None, rollout)
    (message,) = saver.said
    assert message.startswith("checkpoint step_000001_00 can't be written (")
    assert "the last good one is step_000001" in message
    assert names(tmp_path / "checkpoints") == ["step_000001"]


@pytest.mark.parametrize("async_save", [False, True], ids=["at_once", "async"])
def test_a_full_disk_at_the_shards(make_actor, make_saver, tmp_path, async_save):
    """The writer's thread meets it, when there was room for all that is written before."""
    actor, saver = make_actor(), make_saver(async_save=async_save)
    saver.save(checkpoint(actor, 1), actor.policy, None, None)
    saver.finish()
    start = saver._start

    def start_on_a_full_disk(partial: Any, request: Any) -> Any:
        def write(*arguments: Any) -> None:
            with full_disk(1000):
                request.async_fn(*arguments)

        return start(partial, request._replace(async_fn=write))

    saver._start = start_on_a_full_disk
    saver.save(checkpoint(actor, 2), actor.policy, None, None)
    saver.finish()
    (message,) = saver.said
    assert "File too large" in message
    assert "the last good one is step_000001" in message
    assert names(tmp_path / "checkpoints") == ["step_000001"]


def test_the_rollout_comes_back(make_actor, make_saver, tmp_path):
    actor, saver = make_actor(), make_saver()
    rollout: dict[str, Any] = {
        "rollout": {"tokens": torch.arange(6).view(2, 3), "rewards": torch.tensor([0.5, 1.0]), "golds": ["a", "b"]},
        "nothing": None,
        "seconds": 1.5,
    }
    saver.save(checkpoint(actor, 3, in_flight=True), actor.policy, None, rollout)
    path = tmp_path / "checkpoints" / "step_000003_00"
    loaded = torch.load(path / "rollout.pt", weights_only=True)
    for name in ("tokens", "rewards"):
        assert torch.equal(loaded["rollout"].pop(name), rollout["rollout"].pop(name))
    assert loaded == rollout == {"rollout": {"golds": ["a", "b"]}, "nothing": None, "seconds": 1.5}
    assert files.check_files(path) == []
    (path / "rollout.pt").write_bytes((path / "rollout.pt").read_bytes()[:-1])
    assert len(files.check_files(path)) == 1


def test_what_a_kill_left_is_cleaned_up_on_the_next_start(make_actor, make_saver, tmp_path):
    actor = make_actor()
    make_saver().save(checkpoint(actor), actor.policy, None, None)
    (tmp_path / "checkpoints" / ".step_000002.partial" / "shards").mkdir(parents=True)
    make_saver()
    assert names(tmp_path / "checkpoints") == ["step_000001"]


def test_weights_alone(make_actor, make_saver, tmp_path):
    """As the reference policy is saved: no optimizer, and no step behind it."""
    actor, saver = make_actor(seed=1), make_saver()
    saver.save(checkpoint(actor), actor.policy, None, None)
    found, other = find_whole(tmp_path / "checkpoints"), make_actor(seed=2)
    assert found is not None
    load_weights(found, other.policy, SHAPE)
    assert_equal(contents(other), contents(actor))
