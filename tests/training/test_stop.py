"""When a run wants to end."""

from __future__ import annotations

import signal

import pytest

from megatron_core.training import stop
from megatron_core.training.stop import StopRequest


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_is_a_wish_and_the_old_handler_comes_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    request = StopRequest()
    assert not request.wanted
    signal.raise_signal(number)
    assert request.wanted
    request.restore()
    assert signal.getsignal(number) is before


def test_ctrl_c_twice_at_once_is_one_and_later_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal and torchrun both tell a process of the same Ctrl-C; a user who insists is heard."""
    request = StopRequest()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert request.wanted
    monkeypatch.setattr(stop, "SAME_SIGNAL_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    request.restore()


def test_time_runs_out() -> None:
    requests = StopRequest(minutes=0.0), StopRequest(minutes=60.0)
    assert [request.wanted for request in requests] == [True, False]
    for request in reversed(requests):
        request.restore()


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As SIGHUP under nohup: the run goes on when the terminal closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        request = StopRequest()
        signal.raise_signal(signal.SIGHUP)
        assert not request.wanted
        request.restore()
    finally:
        signal.signal(signal.SIGHUP, before)
