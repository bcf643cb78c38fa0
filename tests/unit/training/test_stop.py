"""Signals become requests; an impatient second Ctrl-C interrupts, one that torchrun passes on does not."""

from __future__ import annotations

import signal

import pytest

from nemo_sspo.training import stop


def test_the_first_signal_is_a_request(groups):
    with stop.stop_on_signals() as request:
        assert not request.agreed(groups.dp_cp)
        signal.raise_signal(signal.SIGTERM)
        assert request.signal_name == "SIGTERM"
        assert request.agreed(groups.dp_cp)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_ctrl_c_interrupts_after_two_seconds_only(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(stop.time, "monotonic", lambda: now[0])
    with stop.stop_on_signals() as request:
        signal.raise_signal(signal.SIGINT)
        now[0] += 1.5
        signal.raise_signal(signal.SIGINT)
        assert request.signal_name == "SIGINT"
        now[0] += 1.0
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
