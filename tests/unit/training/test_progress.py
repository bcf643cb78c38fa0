"""What a person sees while a run goes on."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from nemo_sspo.training.progress import Progress

RECORD = {
    "reward/mean": 1.25, "entropy/mean": 0.4, "ratio/mean": 1.01, "ratio/max": 2.5, "gate_weight/mean": 0.9,
    "loss/mean": 0.1, "grad_norm": 0.75, "lr": 3e-5,
}  # fmt: skip


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def log_progress(**options):
    out, clock = io.StringIO(), Clock()
    console = Console(file=out, width=200, force_terminal=False)
    return Progress(console=console, clock=clock, **{"stage": "grpo", "total": 100, **options}), clock, out


def test_a_log_gets_a_plain_line_now_and_then_and_one_at_the_end():
    progress, clock, out = log_progress(total=4, interval=10)
    with progress:
        for _ in range(4):
            clock.now += 4
            progress.update(RECORD)
    numbers = "reward 1.250 | entropy 0.400 | ratio mean/max 1.010/2.500 | gate 0.900 | grad norm 0.75"
    assert out.getvalue().splitlines() == [
        f"GRPO 1/4 | {numbers} | 0:12 left",
        f"GRPO 4/4 | {numbers} | took 0:16",
    ]


def test_the_end_is_not_said_twice_and_a_stage_with_nothing_left_says_nothing():
    progress, _, out = log_progress(total=1, interval=0)
    with progress:
        progress.update({})
    assert out.getvalue().splitlines() == ["GRPO 1/1 | took 0:00"]
    progress, _, out = log_progress(total=5, done=5)
    with progress:
        pass
    assert out.getvalue() == ""


@pytest.mark.parametrize(
    ("total", "done", "steps", "seconds", "expected"),
    [
        (100, 0, 0, 5, "-:-- left"),
        (100, 0, 10, 20, "3:00 left"),
        (100, 90, 5, 10, "0:10 left"),  # a resumed run: 2 s a step, not 10 s for 95
        (1000, 0, 1, 10, "2:46:30 left"),
        (10, 0, 10, 65, "took 1:05"),
    ],
)
def test_time_left_is_judged_by_the_steps_of_this_process(total, done, steps, seconds, expected):
    progress, clock, _ = log_progress(total=total, done=done, interval=1e9)
    with progress:
        clock.now += seconds
        progress.update({}, advance=steps)
        assert progress.time_left() == expected


def test_validation_adds_its_number_without_a_step_and_null_is_a_dash():
    progress, _, _ = log_progress()
    progress.update({"pass_at_1": 0.875}, advance=0)
    progress.update({"ratio/mean": None, "ratio/max": 3.0, "entropy/mean": None})
    assert progress.done == 1
    assert progress.numbers() == ["pass@1 0.875", "ratio mean/max -/3.000"]


def test_the_cold_start_shows_its_loss():
    progress, _, _ = log_progress(stage="cold_start")
    progress.update({"loss/mean": 1.23456, "grad_norm": 2.0, "lr": 0.002})
    assert progress.numbers() == ["loss 1.2346", "grad norm 2.00", "lr 2.0e-03"]


def test_a_terminal_gets_a_bar_and_messages_stay():
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None)
    with Progress("grpo", 100, 20, console=console) as progress:
        progress.update(RECORD)
        progress.message("saved [bold]step_000020[/bold]")
    out = file.getvalue()
    assert "saved [bold]step_000020[/bold]" in out
    assert "━" in out
    assert "21/100" in out
    assert "ratio mean/max 1.010/2.500" in out


def test_other_ranks_are_silent(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    for terminal in (True, False):
        file = io.StringIO()
        console = Console(file=file, force_terminal=terminal)
        with Progress("grpo", 3, console=console, interval=0) as progress:
            progress.update(RECORD)
            progress.message("hello")
        assert file.getvalue() == ""
