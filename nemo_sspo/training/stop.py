"""Stopping on a signal: after the step in hand, with everything saved."""

from __future__ import annotations

import signal
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

    def agreed(self, group: ProcessGroup) -> bool:
        """Whether any rank was asked to stop. A collective: all ranks stop after the same step."""
        return any_rank(self.signal_name is not None, group)


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Turn the first SIGINT, SIGTERM or SIGUSR1 into a request; the second SIGINT interrupts at once."""
    request = StopRequest()

    def handle(number: int, frame: object) -> None:
        if number == signal.SIGINT and request.signal_name == "SIGINT":
            raise KeyboardInterrupt
        request.signal_name = signal.Signals(number).name

    previous = {s: signal.signal(s, handle) for s in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
