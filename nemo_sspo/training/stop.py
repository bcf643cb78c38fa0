"""Stopping on a signal: after the step in hand, with everything saved."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.distributed import ProcessGroup

from nemo_sspo.parallel.reductions import any_rank

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
EXIT_RESUMABLE = 75  # EX_TEMPFAIL of sysexits.h: try again later


@dataclass
class StopRequest:
    """Whether this process was asked to stop, and by which signal."""

    signal_name: str | None = None
    when: float = 0.0

    def agreed(self, group: ProcessGroup) -> bool:
        """Whether any rank was asked to stop. A collective: all ranks stop after the same step."""
        return any_rank(self.signal_name is not None, group)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT, SIGTERM or SIGUSR1 into a request; a second SIGINT interrupts at once.

    Not within two seconds of the first: torchrun passes on a Ctrl-C that the terminal has sent to its processes.
    """
    request = StopRequest()

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGINT and request.signal_name == "SIGINT" and time.monotonic() - request.when > 2:
            raise KeyboardInterrupt
        if request.signal_name is None:
            request.signal_name, request.when = signal.Signals(number).name, time.monotonic()

    previous = {s: signal.signal(s, handle) for s in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
