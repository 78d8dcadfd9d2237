"""Judge one mutant in a forked process: rows of the plain model in rising order of cost, then tests."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

from megatron_core import parallel_state
from tests.defects.source import compiled, exchanged, forget_all, function_of
from tests.mutants.edits import Mutant
from tests.mutants.judges import Case, Row, judge_cases, quiet
from tests.mutants.lines import Lines

FOUND = "found"
SURVIVED = "survived"
NOT_EXECUTED = "not executed"
PATIENCE = 60.0
"""Seconds, enough on a busy machine, by which a judge may exceed ten times its usual time."""


@dataclass
class Verdict:
    """The outcome of judging a mutant."""

    name: str
    kind: str
    change: str
    line: int
    outcome: str
    by: str = ""
    """The row or test that finds it."""
    symptom: str = ""
    judges: int = 0
    """Rows and tests that it survives."""
    equal_bits: bool | None = None
    """Whether all rows that it survives compute the bits of a healthy run."""
    seconds: float = 0.0
    final: bool = False
    """Whether all judges have judged it."""

    def line_of_file(self) -> str:
        """The verdict as a line of JSON."""
        return json.dumps(asdict(self), ensure_ascii=False)


@dataclass(frozen=True)
class Budget:
    """Limits of the judges of a mutant: even choices of those that execute its line."""

    rows: int = 8
    layouts: int = 4
    seconds: float = 20.0
    """Usual time of the tests."""


def examine(mutant: Mutant, rows: list[Row], cases: list[Case], lines: Lines, budget: Budget) -> Verdict:
    """Judge a mutant."""
    start = time.monotonic()
    module = mutant.target.partition(":")[0]
    changed = set(lines.numbers(module, mutant.lines))
    chosen = rows_for(mutant, changed, lines.of_module(module), rows, budget)
    tests = cases_for(changed, module, cases, budget.seconds)
    verdict = Verdict(mutant.name, mutant.kind, mutant.change, mutant.lines[0], NOT_EXECUTED)
    if not chosen and not tests:
        return verdict
    verdict.outcome = SURVIVED
    folder = tempfile.mkdtemp(prefix="mutant")
    ours, theirs = Pipe()
    child = os.fork()
    if child == 0:
        ours.close()
        _in_child(mutant, chosen, tests, theirs, folder)
    theirs.close()
    try:
        _listen(ours, verdict)
    finally:
        for kill in (os.killpg, os.kill):
            try:
                kill(child, signal.SIGKILL)
            except ProcessLookupError:
                continue
        os.waitpid(child, 0)
        shutil.rmtree(folder, ignore_errors=True)
    verdict.seconds = round(time.monotonic() - start, 2)
    return verdict


def examine_again(mutant: Mutant, rows: list[Row], cases: list[Case], lines: Lines, budget: Budget) -> Verdict:
    """Judge a mutant by tests, which find most of those that are left, and if none finds it by rows.

    Each in a process of its own, because tests leave modules and settings behind.
    """
    by_tests = examine(mutant, [], cases, lines, budget)
    if by_tests.outcome == FOUND:
        return by_tests
    by_rows = examine(mutant, rows, [], lines, budget)
    if by_rows.outcome == NOT_EXECUTED:
        return by_tests
    by_rows.judges += by_tests.judges
    by_rows.seconds = round(by_rows.seconds + by_tests.seconds, 2)
    return by_rows


def rows_for(mutant: Mutant, changed: set[int], of_module: range, rows: list[Row], budget: Budget) -> list[Row]:
    """The rows that execute a changed line: of one process, then layouts.

    First come rows with settings that the function names, then rows with settings that its module names, then rows that
    execute lines of the module that few others do.
    """
    chosen = varied([row for row in rows if row.lines & changed], of_module)
    function = function_of(mutant.target)
    texts = inspect.getsource(function), inspect.getsource(inspect.getmodule(function))
    words = [set(re.findall(r"\w+", text)) for text in texts]
    chosen.sort(key=lambda row: [-len(named & (row.values | row.layout).keys()) for named in words])  # stable
    alone = [row for row in chosen if not row.name.startswith("layout")]
    layouts = [row for row in chosen if row.name.startswith("layout")]
    return [*alone[: budget.rows], *sorted(layouts[: budget.layouts], key=lambda row: row.seconds)]


def varied(rows: list[Row], of_module: range) -> list[Row]:
    """The rows in turn from sets of rows that execute the same lines of a module, the smallest set first."""
    sets: dict[frozenset[int], list[Row]] = {}
    for row in rows:
        sets.setdefault(frozenset(row.lines.intersection(of_module)), []).append(row)
    turns = [
        (turn, number, row)
        for number, members in enumerate(sorted(sets.values(), key=len))
        for turn, row in enumerate(members)
    ]
    return [row for *_, row in sorted(turns, key=lambda item: item[:2])]


def cases_for(changed: set[int], module: str, cases: list[Case], seconds: float) -> list[Case]:
    """The tests that execute a changed line: those of its package first, the fastest first, in a total time."""
    folder = f"tests/{module.partition('.')[0]}/"
    covering = [case for case in cases if case.lines & changed]
    covering.sort(
        key=lambda case: (not case.name.startswith(folder), case.name.startswith("tests/parity"), case.seconds)
    )
    chosen = []
    total = 0.0
    for case in covering:
        if total + case.seconds <= seconds or not chosen:
            chosen.append(case)
            total += case.seconds
    return chosen


def _listen(pipe: Connection, verdict: Verdict) -> None:
    """Fill in the verdict from the messages of the child."""
    name, limit = "start", PATIENCE
    try:
        while pipe.poll(limit):
            message = pipe.recv()
            if "judge" in message:
                name, limit = message["judge"], PATIENCE + 10 * message["seconds"]
                continue
            for key, value in message.items():
                setattr(verdict, key, value)
            return
        verdict.symptom = f"no answer in {limit:.0f} s"
    except EOFError:
        verdict.symptom = "the process ended"
    verdict.outcome, verdict.by = FOUND, name


def _in_child(mutant: Mutant, rows: list[Row], cases: list[Case], pipe: Connection, folder: str) -> None:
    """Plant the mutant and judge it; sends each judge, then the verdict."""
    os.setpgid(0, 0)
    quiet()
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    message: dict[str, object] = {}
    try:
        function = function_of(mutant.target)
        with exchanged(function, compiled(function, mutant.build())):
            message = _judged(rows, cases, pipe)
    except BaseException as error:  # of the mutation itself
        message = {"outcome": FOUND, "by": "compilation", "symptom": repr(error)[:200]}
    finally:
        pipe.send(message)
        os._exit(0)


def _judged(rows: list[Row], cases: list[Case], pipe: Connection) -> dict[str, object]:
    equal_bits = True
    for number, row in enumerate(rows):
        pipe.send({"judge": row.name, "seconds": row.seconds})
        forget_all()
        parallel_state.destroy_model_parallel()
        try:
            wrong, equal = row.judge()
        except Exception as error:
            wrong, equal = [f"exception {' '.join(repr(error).split())[-200:]}"], False
        if wrong:
            return {"outcome": FOUND, "by": row.name, "symptom": wrong[0], "judges": number}
        equal_bits = equal_bits and equal
    parallel_state.destroy_model_parallel()
    forget_all()
    survived = {"equal_bits": equal_bits if rows else None, "judges": len(rows) + len(cases)}
    if cases:
        pipe.send({"judge": "tests", "seconds": sum(case.seconds for case in cases)})
        failure = judge_cases(cases)
        if failure:
            name, _, symptom = failure.partition(": ")
            return survived | {"outcome": FOUND, "by": name, "symptom": symptom[:200], "judges": len(rows)}
    return survived


def verdicts(path: Path) -> Iterator[Verdict]:
    """The verdicts of a file."""
    for line in path.read_text().splitlines() if path.exists() else ():
        yield Verdict(**json.loads(line))
