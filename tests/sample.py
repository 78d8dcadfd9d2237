"""The sample of ``make test``: the rules by which it leaves cases to ``make verify-all``, which sets WHOLE_MATRIX=1.

1. A test marked ``whole_matrix`` is left out.
2. Of a test marked ``drawn(count)``, ``count`` cases are kept.
3. Of another test that starts ranks or programs, ``CASES`` cases are kept, or one of a long test, unless it is marked
   ``every_case``.
4. In folders of optional parts of the package (features, and packages that a run can do without), each module keeps
   one of ``OPTIONAL_SHARE`` tests that start ranks or programs, with one case each; ``make test-changed`` adds the
   others if the part or the core changed. Modules ``test_planted*`` keep all of theirs.
5. Of the cases of the long tests of optional parts (``long_tests.txt``), each folder keeps one of ``LONG_SHARE``;
   ``make test-changed`` adds the others. Modules ``test_planted*`` and ``test_*_defects`` keep theirs.
6. Of a test in ``tests/ops``, cases in which every pair of values of its parameters occurs: ``tests/ops/conftest.py``.

Kept cases are spread evenly over the cases of the test, so that each new one moves them. Cases of other tests are all
kept. A table with more structure chooses its own rows (``tests.parity.every_row.cover``) and is marked ``every_case``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest

from tests.structure.parts import is_core, modules

TESTS = Path(__file__).parent
WHOLE_MATRIX = os.environ.get("WHOLE_MATRIX") == "1"
"""Run all cases, and more drawn examples."""
CASES = 2
"""Cases of a test that starts ranks or programs."""
OPTIONAL_SHARE = 5
OPTIONAL_FOLDERS = ("benchmarks", "docs", "examples", "tools")
"""Folders that mirror no package; their subjects are optional."""
OPTIONAL_MODULES = ("simulated_gpu/test_cuda_graphs.py",)
"""Tests of a feature in folders of tests of the core."""
LONG_SHARE = 10
LONG_TESTS = TESTS / "long_tests.txt"
"""Names of tests of which a case takes long, which ``python -m tests.costs`` writes; others are short."""
STARTERS = {
    "ForkedPopen",
    "Popen",
    "multiprocessing",
    "run_ranks",
    "run_ranks_of",
    "run_simulated",
    "subprocess",
    "trace_training",
}
"""Names in the code of such a test, or of a function of the tests that it calls."""


def left_out(items: Iterable[pytest.Function]) -> set[pytest.Function]:
    """The tests and cases that ``make test`` does not run."""
    left: set[pytest.Function] = set()
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if item.get_closest_marker("whole_matrix"):
            left.add(item)
        else:
            tests.setdefault((item.path, item.originalname), []).append(item)
    left |= _left_out_of_optional_parts(tests)
    for cases in tests.values():
        kept = spread(len(cases), _count(cases[0], len(cases)))
        left |= {case for number, case in enumerate(cases) if number not in kept}
    return left | _left_out_long_tests([case for cases in tests.values() for case in cases if case not in left])


def is_long(case: pytest.Function) -> bool:
    """Whether the test of a case is listed in ``LONG_TESTS``."""
    return case.nodeid.partition("[")[0] in _long_names(LONG_TESTS)


@cache
def _long_names(path: Path) -> frozenset[str]:
    return frozenset(path.read_text(encoding="utf-8").splitlines())


def _left_out_long_tests(cases: Iterable[pytest.Function]) -> set[pytest.Function]:
    """Rule 5: cases of long tests in folders of optional parts."""
    by_folder: dict[Path, list[pytest.Function]] = {}
    for case in cases:
        finds_defects = _plants_defects(case.path) or case.path.stem.endswith("_defects")
        if is_long(case) and is_optional(case.path) and not finds_defects:
            by_folder.setdefault(case.path.parent, []).append(case)
    left: set[pytest.Function] = set()
    for of_folder in by_folder.values():
        kept = spread(len(of_folder), -(-len(of_folder) // LONG_SHARE))
        left |= {case for number, case in enumerate(of_folder) if number not in kept}
    return left


def _plants_defects(path: Path) -> bool:
    """Whether the tests of a file plant defects, which show what the sample finds."""
    return path.stem.startswith("test_planted")


def _left_out_of_optional_parts(tests: dict[tuple[Path, str], list[pytest.Function]]) -> set[pytest.Function]:
    """Rule 4: cases of tests that start ranks or programs, in folders of optional parts."""
    by_module: dict[Path, list[list[pytest.Function]]] = {}
    for (path, _), cases in tests.items():
        if not _plants_defects(path) and is_optional(path) and starts_processes(cases[0].function):
            by_module.setdefault(path, []).append(cases)
    left: set[pytest.Function] = set()
    for of_module in by_module.values():
        kept = spread(len(of_module), -(-len(of_module) // OPTIONAL_SHARE))
        for number, cases in enumerate(of_module):
            is_whole = cases[0].get_closest_marker("every_case") is not None
            kept_cases = len(cases) if is_whole else 1
            left.update(cases[kept_cases:] if number in kept else cases)
    return left


@cache
def is_optional(path: Path) -> bool:
    """Whether the tests of a file are of a part that a run can do without: by the folder's package."""
    folder = path.parent.relative_to(TESTS)
    is_listed = path.relative_to(TESTS).as_posix() in OPTIONAL_MODULES
    if is_listed or (folder.parts[:1] and folder.parts[0] in OPTIONAL_FOLDERS):
        return True
    while folder.parts and ".".join(folder.parts) not in modules():
        folder = folder.parent
    return bool(folder.parts) and not is_core(".".join(folder.parts))


def spread(length: int, count: int) -> set[int]:
    """``count`` of the numbers below ``length``, the first and the last among them."""
    return {round(number * (length - 1) / max(count - 1, 1)) for number in range(count)}


def _count(case: pytest.Function, length: int) -> int:
    drawn = case.get_closest_marker("drawn")
    if drawn is not None:
        return int(drawn.args[0])
    if case.get_closest_marker("every_case") or not starts_processes(case.function):
        return length
    return min(length, 1 if is_long(case) else CASES)


def starts_processes(function: Callable[..., Any]) -> bool:
    """Whether the code of ``function``, or of a function of the tests that it calls, has one of ``STARTERS``."""
    seen: set[object] = set()
    left: list[Any] = [function]
    while left:
        function = left.pop()
        function = getattr(function, "__wrapped__", function)
        if not isinstance(function, FunctionType) or function in seen:
            continue
        seen.add(function)
        names = set(_names(function.__code__))
        if names & STARTERS:
            return True
        values = [function.__globals__.get(name) for name in names]
        for module in [value for value in values if isinstance(value, ModuleType)]:
            if module.__name__.startswith("tests"):
                values += [getattr(module, name, None) for name in names]
        # A test module in a folder without __init__.py has no package in its name.
        ours = ("tests.", function.__module__)
        left += [value for value in values if str(getattr(value, "__module__", "")).startswith(ours)]
    return False


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
