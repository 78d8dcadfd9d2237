"""Time limits of groups and of the watchdog: a report comes before a backend aborts the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_core.parallel.exit_status import RESTART
from megatron_core.parallel.time_limit import group_limit, set_nccl_limits, watchdog_limit

ROOT = Path(__file__).parents[2]


def run(case: str) -> tuple[int, str]:
    """Exit status of the launcher, and its standard error."""
    command = [sys.executable, "-m", "tests.parallel.aborting", case]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    return ended.returncode, ended.stderr


def test_the_report_comes_before_the_abort() -> None:
    """NCCL's thread aborts the process: with equal limits, no report would say where the other rank hangs."""
    status, text = run("known")
    assert status == RESTART
    assert "has made no progress for" in text and "in iteration 7" in text and "time.sleep(120.0)" in text, text
    assert "SIGABRT" not in text


def test_an_abort_ends_with_the_status_of_a_restart() -> None:
    status, text = run("unknown")
    assert status == RESTART
    assert "rank 0 was killed by SIGABRT, as by torch if NCCL fails; status 75" in text
    assert "has made no progress for" not in text, "the limit of the group has come first"


@pytest.mark.parametrize("limit", [1.0, 60.0, 600.0])
def test_order_of_the_limits(limit: float) -> None:
    assert group_limit("nccl", limit) >= watchdog_limit("nccl", limit) + 10.0
    assert group_limit("nccl", 600.0) == 1.5 * watchdog_limit("nccl", 600.0)
    for backend in ("gloo", "shm"):  # their errors name the collective
        assert group_limit(backend, limit) < watchdog_limit(backend, limit)


def test_variables_of_torch_are_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.delenv("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", raising=False)
    set_nccl_limits(900.0)
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "1"
    assert os.environ["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "960"
