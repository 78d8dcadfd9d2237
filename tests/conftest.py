"""Settings of all tests, and the selection of ``make test-fast``."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, settings

# OpenMP reads it when torch is imported. Its threads spin while they wait for each other: with two workers on two cores
# and the default of two threads, tests took twice the processor time. Tests of threads set the number themselves.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from megatron_core import parallel_state
from tests.costs import Costs
from tests.huge_pages import collapse
from tests.sample import WHOLE_MATRIX, left_out

# Every run loads it with its callbacks, in 40 ms of processor time on each rank; forked ranks inherit the import.
import_module("megatron_core.reports.memory_report")

# ``fast``: tests in modules that start no process, except these modules and folders, whose tests are numerous or long;
# and tests marked explicitly.
LONG_FOLDERS = {"defects", "end_to_end", "examples", "ops", "parity", "plain", "preprocess", "tools", "verify"}
LONG_MODULES = {"test_bottlenecks", "test_mlflow", "test_plan_layout", "test_wandb"}
PROCESS_STARTERS = {"ForkedPopen", "multiprocessing", "ranks_without_launcher", "run_ranks", "run_ranks_of"}
PROCESS_STARTERS |= {"server_of", "subprocess"}
# The same examples in every run, so that failures are reproducible, and no time limits, which a busy machine exceeds;
# the whole matrix draws new examples.
settings.register_profile(
    "make test", deadline=None, derandomize=not WHOLE_MATRIX, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("make test")

PYTHONPATH = os.environ.get("PYTHONPATH")

# If these are set, pytest shows every difference of two unequal values, which takes hours for long ones.
for name in ("CI", "BUILD_NUMBER"):
    os.environ.pop(name, None)
# Help and progress use the width of the terminal; a narrow one would change line breaks.
os.environ["COLUMNS"] = "80"
# torch's TCPStore looks up the host name of each peer, only to log it. If the name server drops a query, glibc
# waits 5 s by default (seen for 1 in 15 stores).
os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"

# A shell starts background jobs with Ctrl-C ignored, and nohup any job with SIGHUP; programs started by tests would
# inherit this.
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


# Collections of garbage took an eighth of all processor time. During the collection of tests nothing becomes garbage,
# and the million objects that it makes live as long as the process: a collection would visit them for nothing, and in
# a forked rank copy their pages.
GC_THRESHOLDS = 20_000, 20, 20
MANY_TESTS = 500
"""Tests from which on forks from huge pages save more than the second that the move takes."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--costs FILE``."""
    parser.addoption("--costs", metavar="FILE", help="write processor seconds and waits of each test to FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Measure tests; no collection of garbage while tests are collected."""
    config.pluginmanager.register(Costs(), "costs")
    gc.disable()


def pytest_collection_finish(session: pytest.Session) -> None:
    """Collect garbage among what tests make from now on, and let them fork in less time."""
    gc.freeze()
    if len(session.items) > MANY_TESTS:
        collapse()
    gc.set_threshold(*GC_THRESHOLDS)
    gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Function]) -> None:
    """Mark the fast tests; without WHOLE_MATRIX=1 keep the sample."""
    for item in items:
        if _is_short(item.module) and "memory" not in item.name:  # those make large files
            item.add_marker("fast")
    # Modules of tests that import the drop-in export it to all programs that tests start.
    os.environ.pop("PYTHONPATH", None)
    if PYTHONPATH is not None:
        os.environ["PYTHONPATH"] = PYTHONPATH
    if not WHOLE_MATRIX:
        later = left_out(items)
        config.hook.pytest_deselected(items=[item for item in items if item in later])
        items[:] = [item for item in items if item not in later]


@cache
def _is_short(module: ModuleType) -> bool:
    path = Path(module.__file__)
    folder = path.relative_to(Path(__file__).parent).parts[0]
    is_long = folder in LONG_FOLDERS or path.stem in LONG_MODULES
    return not is_long and not PROCESS_STARTERS & vars(module).keys()


@pytest.fixture(autouse=True)
def deterministic_mode_is_not_left_on() -> Iterator[None]:
    """Restore torch's mode: with it new memory is filled, also in the ranks of later tests."""
    was_on = torch.are_deterministic_algorithms_enabled()
    yield
    if torch.are_deterministic_algorithms_enabled() != was_on:
        torch.use_deterministic_algorithms(was_on)


@pytest.fixture(autouse=True)
def no_variable_is_left_behind() -> Iterator[None]:
    """Restore the environment, which programs that later tests start would inherit: the drop-in sets PYTHONPATH, and
    DeepSpeed's ``init_distributed`` of one process the variables of torchrun."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def no_layout_is_left_behind() -> Iterator[None]:
    """A run in this process makes its layout current; clear it for the next test."""
    yield
    parallel_state.destroy_model_parallel()
