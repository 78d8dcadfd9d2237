"""Requests to stop a run."""

from __future__ import annotations

import signal

import pytest

from megatron_core.training import built_in_callbacks as stop
from megatron_core.training.built_in_callbacks import StopRequests
from tests.runs import tiny_run


def requests_of(**settings: object) -> StopRequests:
    requests = StopRequests(tiny_run(**settings))
    requests.before_run()
    return requests


@pytest.mark.parametrize("number", stop.SIGNALS)
def test_a_signal_is_a_request_and_the_old_handler_is_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    request = requests_of()
    assert not request.run.stop_reason
    signal.raise_signal(number)
    assert request.run.stop_reason
    request.close()
    assert signal.getsignal(number) is before


def test_ctrl_c_twice_at_once_is_one_and_later_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The terminal and torchrun both send the same Ctrl-C; a later one interrupts."""
    request = requests_of()
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)
    assert request.run.stop_reason
    monkeypatch.setattr(stop, "SAME_SIGNAL_SECONDS", -1.0)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    request.close()


def test_time_limit() -> None:
    requests = [requests_of(exit_duration_in_mins=minutes) for minutes in (1e-9, 60.0)]
    for request in requests:
        request.before_step()
    assert [request.run.stop_reason for request in requests] == ["time limit", ""]
    for request in reversed(requests):
        request.close()


def test_a_signal_that_is_ignored_stays_so() -> None:
    """As SIGHUP under nohup: the run continues after the terminal closes."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        request = requests_of()
        signal.raise_signal(signal.SIGHUP)
        assert not request.run.stop_reason
        request.close()
    finally:
        signal.signal(signal.SIGHUP, before)
