"""The judges of mutants: configurations of the plain model, then tests, each with the lines that it executes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from megatron_core.verify.trace import Trace
from tests.defects.source import forget_all
from tests.mutants.lines import Lines
from tests.plain.engine import BASE, beyond, differences, engine_trace, samples_of, settings_of, start_of
from tests.plain.rows import FURTHER_LAYOUTS, LAYOUTS, ROWS, SCALED_LOSS, Values
from tests.plain.training import Record, train

STEPS = 3
FOLDERS = (
    *("ops", "tensor_parallel", "transformer", "models", "pipeline_parallel", "data_parallel"),
    *("features/context_parallelism", "optimizer", "parallel", "training", "datasets", "parity"),
    # The only tests of sums with other bytes on the wire, of means over groups of ranks, of adapters, and of updates of
    # whole matrices; of units of a user's own model; and of what a shard stores.
    *("features/compression", "features/outer_steps", "features/lora", "features/matrix_optimizers"),
    *("features/equal_bits", "features/fp8", "features/qk_clip", "features/multi_token", "any_model", "checkpoint"),
    "features/experts",
    "features/context_parallelism",
)
"""Folders of tests that claim the mutated packages."""
FILES = tuple(f"tests/plain/test_{name}.py" for name in ("initial", "loop", "data", "groups", "precisions"))


@dataclass
class Row:
    """A configuration, which the engine trains as the plain model."""

    name: str
    values: Values
    world_size: int = 1
    layout: Values = field(default_factory=dict)
    loss_scale: float | None = None
    seconds: float = 0.0
    lines: set[int] = field(default_factory=set)
    healthy: tuple[Trace, Record] | None = None

    def traced(self) -> Trace:
        """The trace of the engine."""
        return engine_trace(self.values | self.layout, STEPS, self.world_size, self.loss_scale)

    def plainly(self, trace: Trace) -> Record:
        """The plain model's results from the same initial weights, which a healthy run has computed if they are
        equal."""
        start = start_of(trace)
        if self.healthy is not None:
            known = start_of(self.healthy[0])
            if start.keys() == known.keys() and all(start[name].equal(known[name]) for name in start):
                return self.healthy[1]
        settings = settings_of(self.values)
        return train(settings, start, samples_of(BASE | self.values, STEPS * settings.global_batch_size), STEPS)

    def judge(self) -> tuple[list[str], bool]:
        """The differences from the plain model, and whether the engine's results have the bits of a healthy run."""
        trace = self.traced()
        wrong = beyond(differences(trace, self.plainly(trace), self.loss_scale or 1.0))
        return wrong, self.healthy is not None and equal_bits(trace, self.healthy[0])


def equal_bits(first: Trace, second: Trace) -> bool:
    """Whether two traces are equal."""
    if (first.losses, first.norms) != (second.losses, second.norms) or first.tensors.keys() != second.tensors.keys():
        return False
    return all((value == second.tensors[name]).all() for name, value in first.tensors.items())


def all_rows() -> list[Row]:
    """The configurations of ``tests/plain``, and its layouts."""
    rows = [Row(name, values) for name, values in ROWS.items()]
    rows += [Row(f"{name}, scaled loss", ROWS[name], loss_scale=1024.0) for name in SCALED_LOSS]
    layouts = LAYOUTS | FURTHER_LAYOUTS
    rows += [Row(f"layout {name}", ROWS[row], size, layout) for name, (row, size, layout) in layouts.items()]
    return rows


def learn_rows(rows: list[Row], lines: Lines, known: dict[str, list[int]]) -> None:
    """Compute the healthy results of all rows and their times, and their lines unless they are ``known``."""
    for row in rows:
        start = time.monotonic()
        trace = row.traced()
        row.seconds = time.monotonic() - start
        record = row.plainly(trace)
        assert beyond(differences(trace, record, row.loss_scale or 1.0)) == [], row.name
        row.healthy = (trace, record)
        if row.name in known:
            row.lines = set(known[row.name])
            continue
        lines.take()
        forget_all()
        with lines.recorded():
            row.traced()
        row.lines = lines.take()


@dataclass
class Case:
    """A test of pytest."""

    name: str
    """Its node id."""
    seconds: float
    lines: set[int]


class Recorder:
    """A plugin of pytest that records the time and the lines of each test that passes."""

    def __init__(self, lines: Lines) -> None:
        self.cases: list[Case] = []
        self._lines, self._failed = lines, False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Any:
        """Record one test."""
        self._lines.take()
        self._failed = False
        forget_all()
        start = time.monotonic()
        with self._lines.recorded():
            result = yield
        seconds, lines = time.monotonic() - start, self._lines.take()
        if not self._failed and lines:
            self.cases.append(Case(item.nodeid, seconds, lines))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Tests that fail or skip without a mutation judge nothing."""
        self._failed |= report.outcome != "passed"


OPTIONS = ["-q", "-n", "0", "-p", "no:cacheprovider", "-p", "no:randomly", "-o", "addopts=", "--timeout=0"]


def learn_cases(lines: Lines) -> list[Case]:
    """Run the tests of the folders once, with their lines."""
    recorder = Recorder(lines)
    pytest.main([*OPTIONS, *FILES, *(f"tests/{folder}" for folder in FOLDERS)], plugins=[recorder])
    return recorder.cases


class FirstFailure:
    """A plugin of pytest that runs all chosen tests, and keeps the name of the first that fails."""

    def __init__(self) -> None:
        self.name = ""

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        """The sample of ``make test`` is a sample of all tests, not of a few of them."""
        chosen = [*items]
        yield
        items[:] = chosen

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep a failure."""
        if report.failed and not self.name:
            self.name = f"{report.nodeid}: {getattr(report, 'longreprtext', '').strip().splitlines()[-1:]}"


def judge_cases(cases: list[Case]) -> str:
    """The first test that fails; "" if all pass."""
    failure = FirstFailure()
    code = pytest.main([*OPTIONS, "-x", *(case.name for case in cases)], plugins=[failure])
    return failure.name or ("" if code == 0 else f"pytest: {code!r}")


@cache
def quiet() -> None:
    """Send the output of this process to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    torch.set_num_threads(1)
