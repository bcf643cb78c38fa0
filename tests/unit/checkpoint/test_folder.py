"""Checkpoint folders: found in order, known as damaged by any byte that differs, replaced and deleted as a whole."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from nemo_sspo.checkpoint import Checkpoint, Position, best, find_whole, list_checkpoints, read_checkpoint
from nemo_sspo.checkpoint import folder as files
from nemo_sspo.errors import UserError

SHAPE = {"model.hidden_size": 4, "model.tokenizer.type": None}
CONTENT = b"the weights, as it were"
SHARD = "shards/__0_0.distcp"


def checkpoint(path: Path = Path(), stage: str = "grpo", in_flight: bool = False, score=None, **position) -> Checkpoint:
    return Checkpoint(path, Position(**position), stage, SHAPE, optimizer_steps=7, score=score, in_flight=in_flight)


def written(folder: Path, made: Checkpoint, content: bytes = CONTENT) -> Path:
    """A checkpoint under its name in `folder`, with a single shard."""
    path = folder / made.name
    (path / files.SHARDS).mkdir(parents=True)
    Checkpoint(**vars(made) | {"path": path}).write_state()
    (path / SHARD).write_bytes(content)
    files.write_manifest(path, {name: files.describe(path / name) for name in (files.STATE, SHARD)})
    return path


def flip_a_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


IN_ORDER = [  # name, and what it is the name of
    ("cold_start_000040", checkpoint(stage="cold_start", cold_start_step=40)),
    ("cold_start_000100", checkpoint(stage="cold_start", cold_start_step=100)),
    ("step_000000", checkpoint(cold_start_step=120)),
    ("step_000000_01", checkpoint(in_flight=True, cold_start_step=120, step=1, mini_batch=1)),
    ("step_000003", checkpoint(cold_start_step=120, rollout=3, step=12)),
    ("step_000003_00", checkpoint(in_flight=True, cold_start_step=120, rollout=3, step=12)),
    ("step_000003_01", checkpoint(in_flight=True, cold_start_step=120, rollout=3, step=13, mini_batch=1)),
    ("step_000003_03", checkpoint(in_flight=True, cold_start_step=120, rollout=3, step=15, mini_batch=3)),
    ("step_000004", checkpoint(cold_start_step=120, rollout=4, step=16)),
    ("step_1000000", checkpoint(cold_start_step=120, rollout=1_000_000, step=4_000_000)),
]


@pytest.mark.parametrize(("name", "made"), IN_ORDER, ids=[name for name, _ in IN_ORDER])
def test_names(name, made):
    assert made.name == name


def test_listed_in_order_of_progress(tmp_path):
    for _, made in reversed(IN_ORDER):
        written(tmp_path, made)
    assert [c.path.name for c in list_checkpoints(tmp_path)] == [name for name, _ in IN_ORDER]
    assert list_checkpoints(tmp_path / "absent") == []
    made = [made for _, made in IN_ORDER]
    shuffled = made[::-1]
    assert sorted(shuffled, key=lambda c: c.order) == made


def test_state_comes_back(tmp_path):
    position = Position(40, 3, 13, 1, skipped=2, skipped_in_row=1, seconds=1.5)
    made = Checkpoint(tmp_path, position, "grpo", SHAPE, optimizer_steps=13, score=0.25, in_flight=True)
    made.write_state()
    assert read_checkpoint(tmp_path) == made
    assert json.loads((tmp_path / "state.json").read_text())["path"] is None  # so that a folder can be moved


UNREADABLE = {  # state.json
    "garbled": "{",
    "not_an_object": "[]",
    "empty": "",
    "no_position": '{"stage": "grpo"}',
    "unknown_field": '{"stage": "grpo", "position": {}, "shape": {}, "optimizer_steps": 0, "colour": 1}',
    "unknown_position": '{"stage": "grpo", "position": {"colour": 1}, "shape": {}, "optimizer_steps": 0}',
    "not_text": b"\xff\xfe\x00",
    "absent": None,
}


@pytest.mark.parametrize("state", UNREADABLE.values(), ids=UNREADABLE)
def test_an_unreadable_state_is_named_and_left_out(tmp_path, state):
    kept = written(tmp_path, checkpoint(rollout=1))
    path = written(tmp_path, checkpoint(rollout=2))
    (path / files.STATE).unlink()
    if state is not None:
        (path / files.STATE).write_bytes(state if isinstance(state, bytes) else state.encode())
    with pytest.raises(UserError, match="step_000002: not a readable checkpoint"):
        read_checkpoint(path)
    heard: list = []
    assert [c.path for c in list_checkpoints(tmp_path, lambda *args: heard.append(args))] == [kept]
    ((damaged, why),) = heard
    assert damaged == path
    assert "not a readable checkpoint" in why


def test_a_folder_without_a_manifest_is_damaged(tmp_path):
    kept = written(tmp_path, checkpoint(rollout=1))
    path = written(tmp_path, checkpoint(rollout=2))
    (path / files.MANIFEST).unlink()
    heard: list = []
    assert [c.path for c in list_checkpoints(tmp_path, lambda *args: heard.append(args))] == [kept]
    assert heard == [(path, f"{path}: it has no manifest.json")]


def test_what_is_not_a_checkpoint_is_ignored(tmp_path):
    kept = written(tmp_path, checkpoint(rollout=1))
    for name in (".step_000002.partial", ".step_000002.deleted", ".step_000002.replaced"):
        written(tmp_path, checkpoint(rollout=2)).rename(tmp_path / name)
    (tmp_path / "notes.txt").write_text("mine")
    heard: list = []
    assert [c.path for c in list_checkpoints(tmp_path, lambda *args: heard.append(args))] == [kept]
    assert heard == []


BEST = [  # scores in order, mode, index of the best
    ([0.1, 0.5, 0.3], "max", 1),
    ([0.1, 0.5, 0.3], "min", 0),
    ([0.5, 0.5, 0.3], "max", 1),  # the newest among equals
    ([0.3, 0.5, 0.3], "min", 2),
    ([None, 0.0, None], "max", 1),
    ([None, -1.0, 0.0], "min", 1),
    ([None, None], "max", None),
    ([], "max", None),
]


@pytest.mark.parametrize(("scores", "mode", "index"), BEST)
def test_best(scores, mode, index):
    made = [checkpoint(rollout=i, score=score) for i, score in enumerate(scores)]
    for order in (made, made[::-1]):
        assert best(order, mode) is (None if index is None else made[index])


def test_remove(tmp_path):
    kept, path = (written(tmp_path, checkpoint(rollout=i)) for i in (1, 2))
    (tmp_path / ".step_000002.deleted").mkdir()  # by a kill in an earlier attempt
    files.remove(path)
    assert list(tmp_path.iterdir()) == [kept]


@pytest.mark.parametrize("target_exists", [False, True])
def test_publish_replaces(tmp_path, target_exists):
    target = tmp_path / "step_000001"
    if target_exists:
        written(tmp_path, checkpoint(rollout=1), b"old")
        (target / "only in the old one").write_text("")
        (tmp_path / ".step_000001.replaced").mkdir()
        (tmp_path / ".step_000001.replaced" / "file").write_text("by a kill in an earlier attempt")
    made = written(tmp_path / "elsewhere", checkpoint(rollout=1))
    partial = made.rename(tmp_path / ".step_000001.partial")
    made.parent.rmdir()
    files.publish(partial, target)
    assert list(tmp_path.iterdir()) == [target]
    assert {str(p.relative_to(target)) for p in target.rglob("*") if p.is_file()} == {
        "state.json",
        "manifest.json",
        SHARD,
    }
    assert (target / SHARD).read_bytes() == CONTENT
    assert files.check_files(target) == []


LEFT_BEHIND = [  # what a kill left, what there is after the next start, with the content of the shard
    (["partial"], {}),
    (["deleted"], {}),
    (["replaced"], {"step_000001": b"replaced"}),  # between the two renames: the old one gets its name back
    (["replaced", "partial"], {"step_000001": b"replaced"}),
    (["replaced", ""], {"step_000001": b""}),  # after both
    (["", "partial", "deleted"], {"step_000001": b""}),
]


@pytest.mark.parametrize(("left", "expected"), LEFT_BEHIND, ids=["+".join(left) for left, _ in LEFT_BEHIND])
def test_clean_up(tmp_path, left, expected):
    for kind in left:
        path = written(tmp_path / "elsewhere", checkpoint(rollout=1), kind.encode())
        path.rename(tmp_path / (f".step_000001.{kind}" if kind else "step_000001"))
        path.parent.rmdir()
    files.clean_up(tmp_path)
    assert {p.name: (p / SHARD).read_bytes() for p in tmp_path.iterdir()} == expected


HARM = {  # what is done to a checkpoint, and what is said of it
    "missing": (lambda path: (path / SHARD).unlink(), rf"{SHARD} can't be read \(No such file"),
    "longer": (lambda path: (path / SHARD).write_bytes(CONTENT + b"!"), r"has 24 bytes, written were 23"),
    "truncated": (lambda path: (path / SHARD).write_bytes(CONTENT[:-1]), r"has 22 bytes, written were 23"),
    "flipped": (lambda path: flip_a_byte(path / SHARD), rf"{SHARD} has another checksum"),
    "state": (lambda path: flip_a_byte(path / files.STATE), r"state\.json has another checksum"),
    "garbled_manifest": (lambda path: (path / files.MANIFEST).write_text("{"), r"manifest\.json can't be read"),
    "manifest_of_another_kind": (
        lambda path: (path / files.MANIFEST).write_text("[]"),
        r"manifest\.json can't be read",
    ),
    "no_manifest": (lambda path: (path / files.MANIFEST).unlink(), r"manifest\.json can't be read"),
}


@pytest.mark.parametrize("harm", HARM)
def test_check_files(tmp_path, harm):
    do, message = HARM[harm]
    path = written(tmp_path, checkpoint(rollout=1))
    assert files.check_files(path) == []
    do(path)
    (found,) = files.check_files(path)
    assert re.search(message, found), found


def test_any_flipped_byte_of_the_manifest_is_found(tmp_path):
    path = written(tmp_path, checkpoint(rollout=1))
    content = (path / files.MANIFEST).read_bytes()
    for i in range(len(content.rstrip())):
        (path / files.MANIFEST).write_bytes(content[:i] + bytes([content[i] ^ 1]) + content[i + 1 :])
        assert files.check_files(path), f"byte {i} of {content!r}"


def test_the_files_are_shared_among_the_ranks(tmp_path):
    path = written(tmp_path, checkpoint(rollout=1))
    for name in (SHARD, files.STATE):
        flip_a_byte(path / name)
    both = files.check_files(path)
    assert len(both) == 2
    assert [files.check_files(path, slice(rank, None, 2)) for rank in range(2)] == [both[:1], both[1:]]


class TestFindWhole:
    """`find_whole` in a world of one."""

    @pytest.fixture(autouse=True)
    def _world(self, groups) -> None:
        """It is a collective."""

    @pytest.mark.parametrize("exists", [False, True])
    def test_none(self, tmp_path, exists):
        assert find_whole(tmp_path if exists else tmp_path / "absent") is None

    def test_the_newest(self, tmp_path, capsys):
        for i in (1, 2):
            written(tmp_path, checkpoint(rollout=i))
        found = find_whole(tmp_path)
        assert found is not None
        assert found.path == tmp_path / "step_000002"
        assert capsys.readouterr().err == ""

    @pytest.mark.parametrize("name", [SHARD, files.STATE, files.MANIFEST])
    def test_a_damaged_one_is_named_and_the_one_before_taken(self, tmp_path, capsys, name):
        for i in (1, 2, 3):
            written(tmp_path, checkpoint(rollout=i))
        if name == SHARD:
            flip_a_byte(tmp_path / "step_000003" / name)
        else:
            (tmp_path / "step_000003" / name).write_text("{")
        found = find_whole(tmp_path)
        assert found is not None
        assert found.path == tmp_path / "step_000002"
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("Note: step_000003 is damaged and left aside: ")
        assert name.split("/")[-1] in line or "step_000003: not a readable checkpoint" in line
        assert (tmp_path / "step_000003").exists()

    def test_none_is_whole(self, tmp_path, capsys):
        for i in (1, 2):
            flip_a_byte(written(tmp_path, checkpoint(rollout=i)) / SHARD)
        (tmp_path / "step_000003").mkdir()
        with pytest.raises(UserError, match=r"no checkpoint there is whole \(.*step_000003: it has no manifest.json\)"):
            find_whole(tmp_path)
        assert [line.split()[1] for line in capsys.readouterr().err.splitlines()] == [
            "step_000003",
            "step_000002",
            "step_000001",
        ]
