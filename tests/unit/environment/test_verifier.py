"""The process that compares expressions: its limits, its end, its failure to start."""

from __future__ import annotations

import threading
import time

import pytest

from nemo_sspo.environment import verifier
from nemo_sspo.environment.verifier import MathWorker


@pytest.fixture
def worker():
    worker = MathWorker(cpu_seconds=1.5)
    yield worker
    worker.close()


def test_limits(worker):
    assert worker.ask("x+1", "1+x") is True
    first = worker._process
    assert worker.ask("x+2", "9^{9^{9^9}}") is False  # one endless C call, which ends the process
    assert first is not None
    assert first.wait() != 0
    assert worker.ask("x+1", "1+x") is True  # a fresh one
    assert worker._process is not first


def test_questions_from_several_threads_get_their_own_replies(worker):
    replies: dict[int, bool] = {}

    def ask(i: int) -> None:
        replies[i] = worker.ask(f"x+{i}", f"{i - i % 2}+x")

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert replies == {i: i % 2 == 0 for i in range(8)}


def test_a_worker_that_was_killed_is_replaced(worker):
    assert worker.ask("x+1", None) is True
    worker._process.kill()
    worker._process.wait()
    assert worker.ask("x+", None) is False
    assert worker.ask("x+1", None) is True


def test_a_worker_that_cannot_start_is_an_error_and_not_a_reward(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("print('ModuleNotFoundError: no math_verify')")
    monkeypatch.setattr(verifier, "WORKER", script)
    with pytest.raises(RuntimeError, match="did not start: ModuleNotFoundError: no math_verify"):
        MathWorker().ask("x", "y")


def test_a_worker_that_says_nothing_is_given_up(tmp_path, monkeypatch):
    script = tmp_path / "worker.py"
    script.write_text("import time; print('ready', flush=True); time.sleep(60)")
    monkeypatch.setattr(verifier, "WORKER", script)
    worker, start = MathWorker(wall_seconds=1.0), time.monotonic()
    assert worker.ask("x", "x") is False
    assert time.monotonic() - start < 45  # far less than the script's sleep, whatever else the machine does
    assert worker._process is None
