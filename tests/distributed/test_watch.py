"""A rank that dies or fails ends all others, with one message that names it; nothing else does."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from nemo_sspo import cli
from nemo_sspo.errors import UserError
from nemo_sspo.training import watch
from nemo_sspo.training.watch import watch_peers

pytestmark = pytest.mark.distributed

LIMIT = 60.0
MESSAGE = "nemo-sspo: error: "
_CONTEXT = mp.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["torch.distributed"])


@dataclass
class Ended:
    """How the ranks of one run ended."""

    codes: list[int]
    pids: list[int]
    output: list[str]

    def messages(self) -> list[tuple[int, str]]:
        """What the users see: each message with the rank that printed it."""
        return [(rank, line) for rank, text in enumerate(self.output) for line in text.splitlines() if MESSAGE in line]

    def tracebacks(self) -> list[int]:
        """The ranks that printed one."""
        return [rank for rank, text in enumerate(self.output) for _ in range(text.count("Traceback"))]


def run(
    body: Callable[[int], None],
    size: int,
    folder: Path,
    address: str = "127.0.0.1",
    hosts: Sequence[str] = (),
    grace: float = 0.5,
    join: float = 300.0,
) -> Ended:
    """`body` under watch on every rank of a gloo group, started by the command line as torchrun would start it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # in place of torchrun's
    common = {"WORLD_SIZE": str(size), "MASTER_ADDR": address, "MASTER_PORT": str(store.port)}
    common["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    processes = []
    for rank in range(size):
        environment = common | {"RANK": str(rank), "HOSTNAME": hosts[rank] if hosts else socket.gethostname()}
        processes.append(_CONTEXT.Process(target=_rank, args=(body, rank, environment, folder, grace, join)))
        processes[-1].start()
    deadline = time.monotonic() + LIMIT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for rank in hung:
        processes[rank].kill()
    output = [(folder / f"output_{rank}").read_text() for rank in range(size)]
    assert not hung, f"ranks {hung} did not end within {LIMIT:g} s:\n" + "\n".join(output)
    return Ended([process.exitcode for process in processes], [process.pid for process in processes], output)


def _rank(
    body: Callable[[int], None], rank: int, environment: dict[str, str], folder: Path, grace: float, join: float
) -> None:
    with open(folder / f"output_{rank}", "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ |= environment
    socket.gethostname = lambda: environment["HOSTNAME"]
    torch.set_num_threads(1)

    def train(_: object) -> int:
        dist.init_process_group("gloo", timeout=timedelta(minutes=30))
        if body is rank_2_is_late and rank == 2:
            body(rank)
        with watch_peers(grace=grace, join=join):
            body(rank)
        return 0

    cli._train = train
    try:
        code = cli.main(["train", "--config-name", "any"])
    except Exception:
        traceback.print_exc()
        code = 1
    sys.exit(code)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def rank_2_is_killed(rank: int) -> None:
    dist.barrier()
    if rank == 2:
        die()
    dist.barrier()


def rank_0_is_killed(rank: int) -> None:
    dist.barrier()
    if rank == 0:
        die()
    dist.barrier()


def first_host_is_lost(rank: int) -> None:
    dist.barrier()
    if rank < 2:
        die()
    dist.barrier()


def rank_0_is_killed_when_rank_1_has_left(rank: int) -> None:
    if rank == 0:
        time.sleep(1.0)
        die()
    if rank == 2:
        time.sleep(LIMIT)


def rank_1_is_killed_and_leaves_a_child(rank: int) -> None:
    """The child, as of a data loader, holds the sockets of gloo: no other rank sees an error of its own."""
    dist.barrier()
    if rank == 1:
        child = os.fork()
        if child == 0:
            time.sleep(2 * LIMIT)
            os._exit(0)
        print(child, flush=True)
        die()
    dist.barrier()


def rank_2_is_killed_when_the_others_have_left(rank: int) -> None:
    if rank == 2:
        time.sleep(1.0)
        die()


def rank_1_fails(rank: int) -> None:
    if rank == 1:
        raise RuntimeError("out of\nluck")
    dist.barrier()


def rank_0_fails(rank: int) -> None:
    if rank == 0:
        raise RuntimeError("out of\nluck")
    dist.barrier()


def rank_1_refuses(rank: int) -> None:
    if rank == 1:
        raise UserError("model.seed: got 1, allowed: 2")
    dist.barrier()


def rank_0_refuses(rank: int) -> None:
    if rank == 0:
        raise UserError("model.seed: got 1, allowed: 2")
    dist.barrier()


def all_refuse(rank: int) -> None:
    time.sleep(rank / 4)
    raise UserError("model.seed: got 1, allowed: 2")


def all_stop(rank: int) -> None:
    """As on a signal, one of them long after the other's grace would have ended."""
    time.sleep(1.5 * rank)
    raise SystemExit(75)


def leave_one_by_one(rank: int) -> None:
    time.sleep((1, 0, 3, 0)[rank])


def rank_1_is_stopped_for_a_while(rank: int) -> None:
    pids = [0, 0]
    dist.all_gather_object(pids, os.getpid())
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
        time.sleep(3.0)
        os.kill(pids[1], signal.SIGCONT)
    dist.barrier()


def strangers_call(rank: int) -> None:
    if rank == 0:
        hub = next(s for s in watch._sockets if s.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)).getsockname()
        claim = b'guess {"rank": 1, "host": "other", "pid": 1}\n{"left": true}\n'
        for words in (claim, b"\xff\n", b"GET / HTTP" * 1000):
            with socket.create_connection(hub, timeout=10) as stranger, suppress(ConnectionResetError, BrokenPipeError):
                stranger.sendall(words)
                assert stranger.recv(1) == b""
        socket.create_connection(hub).close()
    dist.barrier()


def rank_2_is_late(rank: int) -> None:
    if rank == 2:
        time.sleep(3.0)
        die()
    dist.barrier()


@pytest.mark.parametrize(("body", "victim", "speaker"), [(rank_2_is_killed, 2, 0), (rank_0_is_killed, 0, 1)])
def test_killed_rank_ends_all_others(body, victim, speaker, tmp_path):
    ended = run(body, 4, tmp_path)
    assert ended.codes == [-signal.SIGKILL if rank == victim else 1 for rank in range(4)]
    [(rank, message)] = ended.messages()
    assert rank == speaker
    assert f"rank {victim} ({socket.gethostname()}, pid {ended.pids[victim]}) ended without a word" in message
    assert "The run can be resumed from its last checkpoint by the same command." in message
    assert not ended.tracebacks()


def test_child_of_killed_rank_does_not_hide_its_death(tmp_path):
    try:
        ended = run(rank_1_is_killed_and_leaves_a_child, 3, tmp_path)
    finally:
        os.kill(int((tmp_path / "output_1").read_text()), signal.SIGKILL)
    assert ended.codes == [1, -signal.SIGKILL, 1]
    [(rank, message)] = ended.messages()
    assert rank == 0 and f"rank 1 ({socket.gethostname()}, pid {ended.pids[1]})" in message


def test_somebody_speaks_when_rank_zero_and_its_neighbour_are_gone(tmp_path):
    ended = run(first_host_is_lost, 4, tmp_path, hosts=("a", "a", "b", "b"))
    assert ended.codes == [-signal.SIGKILL, -signal.SIGKILL, 1, 1]
    [(rank, message)] = ended.messages()
    assert rank == 2 and f"rank 0 (a, pid {ended.pids[0]}) ended without a word" in message


def test_somebody_speaks_when_rank_zero_dies_after_the_first_has_left(tmp_path):
    ended = run(rank_0_is_killed_when_rank_1_has_left, 3, tmp_path)
    assert ended.codes == [-signal.SIGKILL, 0, 1]
    [(rank, message)] = ended.messages()
    assert rank == 2 and "rank 0 (" in message


def test_death_is_told_after_rank_zero_is_done(tmp_path):
    ended = run(rank_2_is_killed_when_the_others_have_left, 3, tmp_path)
    assert ended.codes == [1, 0, -signal.SIGKILL]
    [(rank, message)] = ended.messages()
    assert rank == 0 and "rank 2 (" in message


@pytest.mark.parametrize(("body", "victim", "speaker"), [(rank_1_fails, 1, 0), (rank_0_fails, 0, 1)])
def test_failed_rank_shows_its_traceback_and_is_named(body, victim, speaker, tmp_path):
    ended = run(body, 3, tmp_path)
    assert ended.codes == [1, 1, 1]
    [(rank, message)] = ended.messages()
    assert rank == speaker
    assert f"rank {victim} ({socket.gethostname()}, pid {ended.pids[victim]}) failed: RuntimeError: out" in message
    assert ended.tracebacks() == [victim]


@pytest.mark.parametrize(
    ("body", "codes", "says"),
    [
        (rank_1_refuses, [1, 2, 1], "failed: model.seed: got 1, allowed: 2; all other ranks end now"),
        (rank_0_refuses, [2, 1, 1], f"{MESSAGE}model.seed: got 1, allowed: 2"),
        (all_refuse, [2, 2, 2], f"{MESSAGE}model.seed: got 1, allowed: 2"),
    ],
)
def test_user_error_is_shown_once(body, codes, says, tmp_path):
    # The address stands for another host's, so the hub listens beyond 127.0.0.1. Where all refuse, none waits.
    ended = run(body, 3, tmp_path, address="127.0.0.2", grace=LIMIT if body is all_refuse else 0.5)
    assert ended.codes == codes
    [(rank, message)] = ended.messages()
    assert rank == 0 and says in message
    assert not ended.tracebacks()


@pytest.mark.parametrize(
    ("body", "size", "code"),
    [(leave_one_by_one, 4, 0), (all_stop, 2, 75), (rank_1_is_stopped_for_a_while, 2, 0), (strangers_call, 2, 0)],
)
def test_no_alarm(body, size, code, tmp_path):
    ended = run(body, size, tmp_path)
    assert (ended.codes, ended.messages(), ended.tracebacks()) == ([code] * size, [], []), ended.output


def test_rank_that_never_enters_is_named(tmp_path):
    ended = run(rank_2_is_late, 3, tmp_path, join=1.0)
    assert ended.codes == [1, 1, -signal.SIGKILL]
    [(rank, message)] = ended.messages()
    assert rank == 0 and "rank 2 did not start within 1 s" in message


def test_one_rank_needs_no_watch():
    with watch_peers(rank=0, world_size=1):
        pass
