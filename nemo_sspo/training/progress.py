"""Live progress of a run's two stages: a bar on a terminal, a plain line now and then in a log."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

TITLES = {"cold_start": "Cold start", "grpo": "GRPO"}

# What is shown, in this order: label, the keys it is made of, format.
_NUMBERS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("loss", ("loss/mean",), ".4f"),
    ("reward", ("reward/mean",), ".3f"),
    ("pass@1", ("pass_at_1",), ".3f"),
    ("entropy", ("entropy/mean",), ".3f"),
    ("ratio mean/max", ("ratio/mean", "ratio/max"), ".3f"),
    ("gate", ("gate_weight/mean",), ".3f"),
    ("grad norm", ("grad_norm",), ".2f"),
    ("lr", ("lr",), ".1e"),
)
_HIDDEN = {"grpo": {"loss", "lr"}}  # the loss of a policy gradient says nothing by itself


class Progress:
    """Shows how far a stage is and its latest numbers, on rank 0 only.

    ::

        with Progress(stage="grpo", total=100, done=20) as progress:
            progress.update(record)                      # one step further, with a record of metrics.jsonl
            progress.update(validation, advance=0)       # new numbers, no step
            progress.message("saved checkpoints/step_000020")

    Args:
        stage: ``cold_start`` or ``grpo``.
        total: steps of the whole stage.
        done: steps that a resumed run has behind it; time left is judged by the steps since.
        enabled: show anything at all; by default on rank 0 (the environment's RANK, as torchrun sets it).
        console: where to write; by default standard output.
        interval: seconds between two plain lines where the console is no terminal.
        clock: seconds; for tests.
    """

    def __init__(
        self,
        stage: str,
        total: int,
        done: int = 0,
        *,
        enabled: bool | None = None,
        console: Console | None = None,
        interval: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stage, self.total, self.done = stage, total, done
        self.enabled = os.environ.get("RANK", "0") == "0" if enabled is None else enabled
        self._console = console or Console(highlight=False)
        self._interval, self._clock = interval, clock
        self._first, self._started, self._last_line = done, clock(), -math.inf
        self._shown_done = -1
        self._record: dict[str, Any] = {}
        self._live: Live | None = None

    def __enter__(self) -> Progress:
        self._started = self._clock()
        if self.enabled and self._console.is_terminal and self.done < self.total:
            live = self._live = Live(get_renderable=self._bar, console=self._console, refresh_per_second=4)
            live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self.done not in (self._first, self._shown_done):
            self._plain_line()

    def update(self, record: Mapping[str, Any], advance: int = 1) -> None:
        """Take over the newest numbers, by the keys of the run's files, and go `advance` steps further."""
        self._record.update(record)
        self.done += advance
        if self._live is None and self._clock() - self._last_line >= self._interval:
            self._plain_line()

    def message(self, text: str) -> None:
        """Write a line that stays, above the bar."""
        if self.enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def numbers(self) -> list[str]:
        """The latest numbers, such as ``reward 0.512``; a number that is not known yet is left out."""
        shown = []
        for label, keys, spec in _NUMBERS:
            values = [self._record.get(key) for key in keys]
            if label in _HIDDEN.get(self.stage, ()) or all(value is None for value in values):
                continue
            texts = ["-" if value is None else format(float(value), spec) for value in values]
            shown.append(f"{label} {'/'.join(texts)}")
        return shown

    def time_left(self) -> str:
        """``1:05 left`` at the pace since this process began the stage; ``took 1:05`` at its end."""
        elapsed, steps = self._clock() - self._started, self.done - self._first
        if self.done >= self.total:
            return f"took {_clock_face(elapsed)}"
        return f"{_clock_face(elapsed / steps * (self.total - self.done))} left" if steps > 0 else "-:-- left"

    def _plain_line(self) -> None:
        parts = [f"{TITLES[self.stage]} {self.done}/{self.total}", *self.numbers(), self.time_left()]
        self._last_line, self._shown_done = self._clock(), self.done
        self.message(" | ".join(parts))

    def _bar(self) -> Group:
        line = Table.grid(padding=(0, 1), expand=True)
        for ratio in (None, 1, None, None):
            line.add_column(ratio=ratio, no_wrap=True)
        line.add_row(
            Text(TITLES[self.stage], style="bold"),
            ProgressBar(total=max(self.total, 1), completed=self.done),
            f"{self.done}/{self.total}",
            self.time_left(),
        )
        return Group(line, Text("  ".join(self.numbers()), style="cyan"))


def _clock_face(seconds: float) -> str:
    hours, rest = divmod(round(seconds), 3600)
    return f"{hours}:{rest // 60:02}:{rest % 60:02}" if hours else f"{rest // 60}:{rest % 60:02}"
