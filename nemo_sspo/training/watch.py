"""Ends the whole run when one of its ranks dies or fails, with one message that names it.

Without this the other ranks sit in a collective until its timeout. Every rank holds a TCP connection to the hub, a
thread of rank 0. The kernel closes the connection of a process that ends, whatever ended it, and keeps that of one that
is only slow or stopped: no heartbeats, so no false alarms. A host that vanishes is found out by TCP keepalive. A rank
that ends as it should says so first.

One JSON object a line. To the hub: ``{"rank", "host", "pid"}`` behind the token, later ``{"left"}`` or ``{"failed",
"said"}``. From it: ``{"heir"}``, and at the end ``{"released"}`` (go on) or ``{"verdict", "speaker"}`` (end at once).
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import json
import math
import os
import secrets
import selectors
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from nemo_sspo.errors import UserError
from nemo_sspo.training.stop import EXIT_RESUMABLE

Word = dict[str, Any]

_DIED = " ended without a word (killed? out of memory?)"
_LOOPBACK = "127.0.0.1"
_LINGER = 1.0  # seconds from the verdict to the end: for output, and for the launcher to see the culprit end first
# Half a minute of silence is the end of a host; the last holds where something sent is still unacknowledged.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": 30_000}

_uses = itertools.count()  # every rank counts alike, so a second watch over one store has a key of its own
_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()


@contextmanager
def watch_peers(
    store: dist.Store | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    grace: float = 5.0,
    join: float = 300.0,
) -> Iterator[None]:
    """Within it, a rank that dies or fails ends all others: exit status 1, and one message on standard error.

    Enter it on every rank right after the process group has started, and leave it before that group is destroyed: a
    rank that fails keeps its groups open until the others know, so they raise no errors of their own about it.

    - A rank that dies has no grace. The message comes from the lowest rank that is left.
    - An exception waits here for up to `grace` seconds for the other ranks to raise theirs, then goes on. Where all
      raise, as on a mistake in the config, nothing is added. Ranks that don't are ended, and the lowest of them says
      which rank failed, unless the command line says it (rank 0's `UserError`). An exception that only tells of a dead
      peer, such as gloo's "Connection closed by peer", is never seen: the death ends this rank first.
    - A rank that leaves in order is no longer watched; rank 0 stays until all others have left.

    Args:
        store: reachable by all ranks; by default the process group's.
        rank: this process's; by default the process group's.
        world_size: 1 does nothing; by default the process group's.
        grace: seconds between a rank's exception and the end of the others.
        join: seconds after which a rank that has not entered counts as dead.
    """
    rank = dist.get_rank() if rank is None else rank
    world_size = dist.get_world_size() if world_size is None else world_size
    if world_size == 1:
        yield
        return
    store = _get_default_store() if store is None else store
    key = f"nemo_sspo/watch/{next(_uses)}"
    if rank == 0:
        store.set(key, json.dumps(_start_hub(world_size, grace, join)))
    store.wait([key], timedelta(seconds=join))
    member = _Member(rank, json.loads(store.get(key)))
    try:
        yield
    except BaseException as error:
        member.leave(_last_word(error, rank))
        raise
    member.leave({"left": True})


def _last_word(error: BaseException, rank: int) -> Word:
    if isinstance(error, SystemExit) and error.code in (None, 0, EXIT_RESUMABLE):
        return {"left": True}
    kind = "" if isinstance(error, UserError) else type(error).__name__
    text = ": ".join(filter(None, (kind, str(error))))
    # What cli.py says of these is enough; it says it on rank 0.
    said = rank == 0 and isinstance(error, UserError | KeyboardInterrupt)
    return {"failed": " ".join(text.split())[:1000], "said": said}


class _Member(threading.Thread):
    """A rank's connection to the hub; its thread ends the process when the hub says so, or is gone."""

    def __init__(self, rank: int, hub: Word) -> None:
        super().__init__(name="watch", daemon=True)
        self.rank, self.hub, self.heir = rank, hub, 1
        self.released = threading.Event()
        self.connection = _connect([_LOOPBACK] if rank == 0 else hub["hosts"], hub["port"])
        hello = {"rank": rank, "host": socket.gethostname(), "pid": os.getpid()}
        self.connection.sendall(f"{hub['token']} {json.dumps(hello)}\n".encode())
        self.start()

    def leave(self, word: Word) -> None:
        """Say why this rank leaves, and wait until the hub lets it go or ends it."""
        with contextlib.suppress(OSError):  # the hub is gone, and `run` about to end this process
            self.connection.sendall(_line(word))
        self.released.wait()

    def run(self) -> None:
        with contextlib.suppress(OSError, ValueError), self.connection, self.connection.makefile() as lines:
            for line in lines:
                word = json.loads(line)
                if "released" in word:
                    self.released.set()
                    return
                if "verdict" in word:
                    _end(word["verdict"] if word["speaker"] == self.rank else None)
                self.heir = word["heir"]
        _end(_message(_name(0, self.hub) + _DIED) if self.rank == self.heir else None)


@dataclass(eq=False)
class _Peer:
    """What the hub knows of a connection: a stranger until its first line has the token."""

    connection: socket.socket
    heard: bytes = b""
    rank: int = -1
    host: str = ""
    name: str = ""
    word: Word = field(default_factory=dict)  # its last one: it has left or failed, or neither yet

    def send(self, word: Word) -> None:
        with contextlib.suppress(OSError):  # if it's gone, its end of file follows
            self.connection.sendall(_line(word))


class _Hub(threading.Thread):
    """Rank 0's thread: hears all ranks, itself among them, and decides when the others must end and who says why."""

    def __init__(self, listener: socket.socket, token: str, world_size: int, grace: float, join: float) -> None:
        super().__init__(name="watch-hub", daemon=True)
        self.listener, self.token, self.grace, self.join_limit = listener, token.encode(), grace, join
        self.selector = selectors.DefaultSelector()
        self.missing = set(range(world_size))  # have not entered yet
        self.members: dict[int, _Peer] = {}  # have entered and are neither gone nor released
        self.dead: _Peer | None = None
        self.failures: list[_Peer] = []  # in the order of their words
        self.heir = 0
        self.verdict: Word | None = None
        self.deadline = time.monotonic() + join

    def run(self) -> None:
        with self.selector, self.listener:
            self.selector.register(self.listener, selectors.EVENT_READ)
            while self.missing or self.members:
                left = None if self.deadline == math.inf else max(0.0, self.deadline - time.monotonic())
                for key, _ in self.selector.select(left):
                    if key.data is None:
                        self._accept()
                    else:
                        self._read(key.data)
                if self.verdict is None:
                    self._appoint_heir()
                    self._decide()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it has gone again
            connection = _kept_alive(self.listener.accept()[0])
            connection.setblocking(False)
            self.selector.register(connection, selectors.EVENT_READ, _Peer(connection))

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        *lines, peer.heard = (peer.heard + data).split(b"\n")
        known = all(self._hear(peer, line) for line in lines)
        if not data or not known or (peer.rank < 0 and len(peer.heard) > 4096):
            self._drop(peer)

    def _hear(self, peer: _Peer, line: bytes) -> bool:
        """Take in one line; False from a stranger."""
        if peer.rank < 0:
            token, _, line = line.partition(b" ")
            if not hmac.compare_digest(token, self.token):
                return False
            self._enter(peer, json.loads(line))
            return True
        peer.word = json.loads(line)
        if "failed" in peer.word:
            self.failures.append(peer)
            self.deadline = min(self.deadline, time.monotonic() + self.grace)
        elif peer.rank != 0:
            self._release(peer)
        return True

    def _enter(self, peer: _Peer, hello: Word) -> None:
        peer.rank, peer.host, peer.name = hello["rank"], hello["host"], _name(hello["rank"], hello)
        self.members[hello["rank"]] = peer
        self.missing.discard(hello["rank"])
        if not self.missing and not self.failures:
            self.deadline = math.inf
        if self.verdict is not None:
            peer.send(self.verdict)

    def _drop(self, peer: _Peer) -> None:
        self.selector.unregister(peer.connection)
        peer.connection.close()
        if self.members.pop(peer.rank, None) and not peer.word:
            self.dead = self.dead or peer

    def _release(self, peer: _Peer) -> None:
        peer.send({"released": True})
        del self.members[peer.rank]

    def _appoint_heir(self) -> None:
        """Keep all told who speaks if rank 0 is lost: a rank on another host if there is one, for hosts die whole."""
        others = {rank: peer for rank, peer in self.members.items() if rank and not peer.word}
        if not self.missing and 0 in self.members and others and self.heir not in others:
            self.heir = min(others, key=lambda rank: (others[rank].host == self.members[0].host, rank))
            for peer in others.values():
                peer.send({"heir": self.heir})

    def _decide(self) -> None:
        late = time.monotonic() >= self.deadline
        running = bool(self.missing) or not all(peer.word for peer in self.members.values())
        if self.dead is not None:  # before any failure, which may only tell of this death
            self._judge(self.dead.name + _DIED, list(self.members.values()))
        elif self.failures and (late or not running):
            first, failed = self.failures[0], [peer for peer in self.failures if peer.rank in self.members]
            said = any(peer.word["said"] for peer in self.failures)
            others = [peer for peer in self.members.values() if peer not in failed]
            self._judge(f"{first.name} failed: {first.word['failed']}", others, said)
            for peer in sorted(failed, key=lambda peer: -peer.rank):  # rank 0 last: this thread ends with it
                self._release(peer)
        elif late:
            ranks = ", ".join(map(str, sorted(self.missing)[:16]))
            self._judge(f"rank {ranks} did not start within {self.join_limit:g} s", list(self.members.values()))
        elif not running and 0 in self.members:
            self._release(self.members[0])

    def _judge(self, what: str, ranks: list[_Peer], said: bool = False) -> None:
        """End `ranks`; the lowest of them says why, unless that is said already."""
        speaker = min((peer.rank for peer in ranks), default=None)
        self.verdict = {"verdict": _message(what), "speaker": None if said else speaker}
        self.deadline = math.inf
        for peer in ranks:
            peer.send(self.verdict)


def _start_hub(world_size: int, grace: float, join: float) -> Word:
    """Start this process's hub; returns what the other ranks need to reach and to name it."""
    # MASTER_ADDR comes first: every rank has reached it already, and rank 0 is there with torchrun and on Slurm.
    master = os.environ.get("MASTER_ADDR", "")
    if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size) or master in ("localhost", _LOOPBACK):
        hosts, listener = [_LOOPBACK], socket.create_server((_LOOPBACK, 0), backlog=world_size)
    else:
        hosts, both = list(filter(None, [master, socket.gethostname()])), socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        listener = socket.create_server(("", 0), family=family, backlog=world_size, dualstack_ipv6=both)
    listener.setblocking(False)
    _sockets.add(listener)
    token = secrets.token_hex(16)
    _Hub(listener, token, world_size, grace, join).start()
    port = listener.getsockname()[1]
    return {"hosts": hosts, "port": port, "token": token, "host": socket.gethostname(), "pid": os.getpid()}


def _connect(hosts: list[str], port: int) -> socket.socket:
    errors = []
    for host in hosts:
        try:
            connection = socket.create_connection((host, port), timeout=60)
        except OSError as error:
            errors.append(f"{host}: {error}")
            continue
        connection.settimeout(None)
        return _kept_alive(connection)
    raise ConnectionError(f"cannot reach rank 0 on port {port} to watch the run ({'; '.join(errors)})")


def _kept_alive(connection: socket.socket) -> socket.socket:
    _sockets.add(connection)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE.items():
        if hasattr(socket, option):  # Linux has them all
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return connection


def _close_in_child() -> None:
    """A forked child must not hold open what tells that its parent has died."""
    for connection in list(_sockets):
        with contextlib.suppress(OSError):
            os.close(connection.detach())  # close() would leave it open for the file that reads from it


os.register_at_fork(after_in_child=_close_in_child)


def _name(rank: int, process: Word) -> str:
    return f"rank {rank} ({process['host']}, pid {process['pid']})"


def _message(what: str) -> str:
    return f"{what}; all other ranks end now. The run can be resumed from its last checkpoint by the same command."


def _line(word: Word) -> bytes:
    return json.dumps(word).encode() + b"\n"


def _end(message: str | None) -> NoReturn:
    """End this process though its main thread may sit in a collective; output that cannot be written is let go."""
    threading.Thread(target=_say, args=(message,), daemon=True).start()
    time.sleep(_LINGER)
    os._exit(1)


def _say(message: str | None) -> None:
    if message is not None:
        print(f"nemo-sspo: error: {message}", file=sys.stderr, flush=True)
    if sys.stdout.isatty():
        sys.stdout.write("\x1b[?25h")  # a progress bar has hidden the cursor
    sys.stdout.flush()
    sys.stderr.flush()
