"""Equality of mathematical expressions, by ``math_verify`` in a process of its own.

Why a process: ``math_verify`` limits its time with signals, which only a main thread can receive, and some answers
(``10^{10^{10}}``) keep the interpreter in one C call that no signal handler and no other thread can interrupt. The
worker here has a limit on its CPU time, set by the kernel, which does not depend on how busy the machine is; a worker
that exceeds it ends, its question counts as "no", and the next question starts a fresh one.
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from functools import lru_cache
from pathlib import Path

WORKER = Path(__file__).with_name("math_worker.py")
CPU_SECONDS = 2.0  # one question
WALL_SECONDS = 60.0  # one question or the start, on a machine that is too busy to do anything


class MathWorker:
    """One worker process, started when it is first asked, shared by the threads of this process."""

    def __init__(self, cpu_seconds: float = CPU_SECONDS, wall_seconds: float = WALL_SECONDS):
        self.cpu_seconds = cpu_seconds
        self.wall_seconds = wall_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0
        self._lock = threading.Lock()

    def ask(self, gold: str, answer: str | None) -> bool:
        """Whether `answer` equals `gold`; with `answer` None, whether `gold` is an expression at all.

        False where that takes too long. RuntimeError if the worker can't start (``math_verify`` is not installed).
        """
        with self._lock:
            if self._process is None or self._process.poll() is not None or self._owner != os.getpid():
                self._start()
            reply = self._exchange(json.dumps([gold, answer]))
            if reply is None:
                self._stop()
            return reply == "true"

    def close(self) -> None:
        """End the worker process, if there is one."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        # A session of its own: Ctrl-C in the terminal is for the trainer, which ends the worker by closing its input.
        self._process = subprocess.Popen(
            [sys.executable, str(WORKER), str(self.cpu_seconds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
        )
        self._owner = os.getpid()
        greeting = self._read_line()
        if greeting != "ready":
            self._stop()
            raise RuntimeError(f"the math_verify worker did not start: {greeting or 'no word from it'}")

    def _exchange(self, line: str) -> str | None:
        assert self._process is not None and self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
        except BrokenPipeError:
            return None
        return self._read_line()

    def _read_line(self) -> str | None:
        """The worker's next line; None if it ended or if `wall_seconds` have passed. Its lines are short: one read."""
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(self.wall_seconds):
                return None
        return self._process.stdout.readline().decode().strip() or None

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None or self._owner != os.getpid():
            return
        process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


_worker = MathWorker()
atexit.register(_worker.close)


@lru_cache(maxsize=4096)
def equal(gold: str, answer: str) -> bool:
    """Whether two expressions (LaTeX or plain, no ``$`` around them) are equal."""
    return _worker.ask(gold, answer)


@lru_cache(maxsize=4096)
def is_expression(text: str) -> bool:
    """Whether `text` can be read as a mathematical expression."""
    return _worker.ask(text, None)
