"""Processor seconds and waits of each test: a summary after the run, and with ``--costs FILE`` a table of all tests.

Processor time includes that of the processes that a test starts and waits for. It hardly depends on what else runs on
the machine, as the duration does.

``python -m tests.costs FILE`` adds the long tests of such a table to ``long_tests.txt``, of which ``make test`` runs a
part (``sample.py``), and removes those that have become short. Measure on an idle machine: on a busy one tests wait.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import sample

FILE_LIMIT = 8.0
"""Processor seconds or waits in seconds from which on the summary lists a file."""
SUMMARY_TESTS = 500
"""Tests from which on a run has a summary."""
LONG_SECONDS = {True: 0.15, False: 0.7}
"""Processor seconds and waits, together, from which on a test is long if one of its cases takes them: of optional
parts, and of the core."""
LONG_TOGETHER = 1.0
"""The same of all cases of a test, and of the fixtures of a module, without whose tests they do not run."""
START = "start and collection"
PHASES = ("setup", "call", "teardown", "in all")


def _clock() -> tuple[float, float]:
    """Processor seconds of this process and its ended children, and the time."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system, time.perf_counter()


class Costs:
    """Measures the tests of this process, and collects the measurements of workers."""

    def __init__(self) -> None:
        # test -> [processor seconds, waits] of each phase; START -> the same of this process before its first test
        self.of_test: dict[str, list[list[float]]] = {}
        self.ends: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        """The phases, and what pytest does between them."""
        self.of_test[item.nodeid] = [[0.0, 0.0] for _ in PHASES]
        return (yield from self._measured(item, "in all"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        """Fixtures."""
        return (yield from self._measured(item, "setup"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        """The test itself."""
        return (yield from self._measured(item, "call"))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        """The ends of fixtures."""
        return (yield from self._measured(item, "teardown"))

    def _measured(self, item: pytest.Item, phase: str) -> Iterator[None]:
        processor, begin = _clock()
        try:
            return (yield)
        finally:
            processor_end, end = _clock()
            used = processor_end - processor
            self.of_test[item.nodeid][PHASES.index(phase)] = [used, max(0.0, end - begin - used)]

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """The processor time of imports and of the collection."""
        self.of_test[START] = [[0.0, 0.0] for _ in PHASES[1:]] + [[_clock()[0], 0.0]]

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A worker sends its measurements."""
        if hasattr(session.config, "workeroutput"):
            session.config.workeroutput["costs"] = json.dumps(self.of_test)
            session.config.workeroutput["end"] = time.time()

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Take the measurements of a worker; one that crashed sent none."""
        output = getattr(node, "workeroutput", {})
        if "costs" not in output:
            return
        costs = json.loads(output["costs"])
        costs[f"{START} of {node.gateway.id}"] = costs.pop(START)
        self.of_test.update(costs)
        self.ends[node.gateway.id] = output["end"]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """The sums, and the files of ``FILE_LIMIT`` and more; nothing after a run of a few tests."""
        path = terminalreporter.config.getoption("--costs", default=None)
        if path:
            self._write_table(Path(path))
        elif len(self.of_test) < SUMMARY_TESTS:
            return
        write = terminalreporter.line
        of_file: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for test, phases in self.of_test.items():
            for number, seconds in enumerate(phases[-1]):
                of_file[test.partition("::")[0]][number] += seconds
        terminalreporter.section("processor seconds, and seconds of waiting")
        for file, seconds in sorted(of_file.items(), key=lambda entry: -sum(entry[1])):
            if max(seconds) >= FILE_LIMIT or file.startswith(START):
                write(f"{seconds[0]:8.1f} {seconds[1]:8.1f}  {file}")
        for number, name in enumerate(("processor seconds", "seconds of waiting")):
            write(f"{sum(seconds[number] for seconds in of_file.values()):8.1f}  {name} in all")
        if self.ends:
            write(f"{max(self.ends.values()) - min(self.ends.values()):8.1f}  s in which not all workers had tests")

    def _write_table(self, path: Path) -> None:
        header = ["test", *(f"{phase}: {what}" for phase in PHASES for what in ("processor", "waits"))]
        rows = sorted(self.of_test.items(), key=lambda entry: -sum(entry[1][-1]))
        table = [[test, *(f"{seconds:.3f}" for pair in phases for seconds in pair)] for test, phases in rows]
        path.write_text("".join("\t".join(row) + "\n" for row in [header, *table]))


def with_measured(names: set[str], table: Path) -> set[str]:
    """The long tests after the measurements in ``table``; ``names``: those before, of which it may lack some."""
    with table.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if not row["test"].startswith(START)]
    cases: dict[str, list[float]] = defaultdict(list)
    setups: dict[str, float] = defaultdict(float)
    for row in rows:
        cases[row["test"].partition("[")[0]].append(_seconds(row, "in all"))
        setups[row["test"].partition("::")[0]] += _seconds(row, "setup")
    long_names = {
        test
        for test, seconds in cases.items()
        if max(seconds) >= LONG_SECONDS[sample.is_optional(sample.TESTS.parent / test.partition("::")[0])]
        or max(sum(seconds), setups[test.partition("::")[0]]) >= LONG_TOGETHER
    }
    return long_names | (names - cases.keys())


def _seconds(row: dict[str, str], phase: str) -> float:
    return float(row[f"{phase}: processor"]) + float(row[f"{phase}: waits"])


if __name__ == "__main__":
    before = set(sample.LONG_TESTS.read_text(encoding="utf-8").splitlines())
    after = sorted(with_measured(before, Path(sys.argv[1])))
    sample.LONG_TESTS.write_text("".join(f"{name}\n" for name in after))
