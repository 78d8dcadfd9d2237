"""The rules by which ``make test`` leaves cases to ``make verify-all``."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from megatron_core.verify import ranks
from tests import costs, programs, sample
from tests.sample import CASES, LONG_SHARE, OPTIONAL_SHARE, TESTS, is_optional, left_out, spread, starts_processes


def _directly() -> None:
    ranks.run_ranks(1, print)


def _through_a_module() -> None:
    programs.run_ranks_of("python x.py")


def _through_a_nested_function() -> object:
    return [_directly() for _ in range(2)]


def _not_at_all() -> None:
    programs.free_port()


@dataclass(eq=False)
class Case:
    """As much of a collected test as the rules read."""

    originalname: str
    function: Any
    marks: dict[str, Any] = field(default_factory=dict)
    path: Path = Path(__file__)
    nodeid: str = ""

    def get_closest_marker(self, name: str) -> Any:
        """The mark, or None."""
        return self.marks.get(name)


def test_starting_is_seen_through_functions_of_the_tests() -> None:
    assert all(map(starts_processes, (_directly, _through_a_module, _through_a_nested_function)))
    assert not starts_processes(_not_at_all)


@pytest.mark.parametrize(
    ("length", "count", "kept"), [(2, 3, {0, 1}), (9, 3, {0, 4, 8}), (9, 1, {0}), (5, 5, {*range(5)})]
)
def test_cases_are_spread(length: int, count: int, kept: set[int]) -> None:
    assert spread(length, count) == kept


def test_marks_change_the_number_of_cases() -> None:
    marks: list[dict[str, Any]] = [
        {},
        {"every_case": True},
        {"drawn": pytest.mark.drawn(5).mark},
        {"drawn": pytest.mark.drawn(0).mark},
        {"whole_matrix": True},
    ]
    numbers = []
    for mark in marks:
        cases: Any = [Case("test", _directly, mark) for _ in range(9)]
        numbers.append(9 - len(left_out(cases)))
    assert numbers == [CASES, 9, 5, 0, 0]
    cheap: Any = [Case("test", _not_at_all) for _ in range(9)]
    assert left_out(cheap) == set()


@pytest.mark.parametrize(
    ("file", "optional"),
    [
        ("any_model/test_cut.py", True),
        ("drop_in/deepspeed/test_clients.py", True),
        ("features/qk_clip/test_qk_clip.py", True),
        ("tools/test_serve.py", True),
        ("transformer/test_norm.py", False),
        ("end_to_end/test_pretrain.py", False),
        ("simulated_gpu/test_cuda_graphs.py", True),
        ("simulated_gpu/test_training.py", False),
        ("parity/test_matrix.py", False),
        ("test_errors.py", False),
    ],
)
def test_optional_parts(file: str, optional: bool) -> None:
    assert is_optional(TESTS / file) == optional


def test_a_module_of_an_optional_part_keeps_a_share_of_its_tests() -> None:
    optional, core = TESTS / "any_model" / "test_x.py", TESTS / "transformer" / "test_x.py"
    count = 4 * OPTIONAL_SHARE - 2
    for path, kept in ((optional, 4), (core, count)):
        cases: Any = [Case(f"test_{number}", _directly, path=path) for number in range(count)]
        assert len(cases) - len(left_out(cases)) == kept
    table: Any = [Case("test", _directly, path=optional) for _ in range(9)]
    assert len(left_out(table)) == 8
    every: Any = [Case("test", _directly, {"every_case": True}, optional) for _ in range(9)]
    assert left_out(every) == set()
    cheap: Any = [Case(f"test_{number}", _not_at_all, path=optional) for number in range(9)]
    assert left_out(cheap) == set()


def test_a_part_of_the_long_tests_of_optional_parts_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"test[{number}]" for number in range(9)]
    (tmp_path / "long").write_text("test\n")
    monkeypatch.setattr(sample, "LONG_TESTS", tmp_path / "long")
    kept = {}
    for file in ("planner/test_search.py", "planner/test_planted.py", "schedules/test_table.py"):
        cases: Any = [Case(name, _not_at_all, path=TESTS / file, nodeid=name) for name in [*names, "short"]]
        kept[file] = len(cases) - len(left_out(cases))
    started: Any = [Case(name, _directly, path=TESTS / "schedules/test_table.py", nodeid=name) for name in names]
    for case in started:
        case.originalname = "test"
    assert len(started) - len(left_out(started)) == 1
    assert kept == {
        "planner/test_search.py": -(-len(names) // LONG_SHARE) + 1,
        "planner/test_planted.py": len(names) + 1,
        "schedules/test_table.py": len(names) + 1,
    }


def test_long_tests_are_listed_by_measurement(tmp_path: Path) -> None:
    table = tmp_path / "costs"
    planner, core = "tests/planner/a.py::", "tests/schedules/a.py::"
    rows = [
        *((f"{planner}long[0]", 0.0, 0.0, 0.1, 0.0), (f"{planner}long[1]", 0.0, 0.0, 0.1, 0.2)),
        *((f"{planner}many[{number}]", 0.0, 0.0, 0.1, 0.0) for number in range(11)),
        *(
            (f"{planner}short", 0.0, 0.0, 0.1, 0.0),
            (f"{core}short", 0.0, 0.0, 0.5, 0.1),
            (f"{core}long", 0, 0, 0.5, 0.3),
        ),
        *(("tests/planner/b.py::fixture", 0.5, 0.6, 0.1, 0.0), ("tests/planner/b.py::after it", 0.0, 0.0, 0.1, 0.0)),
        *((f"{planner}became short", 0.0, 0.0, 0.1, 0.0), (costs.START, 9.0, 0.0, 9.0, 0.0)),
    ]
    header = "test\tsetup: processor\tsetup: waits\tin all: processor\tin all: waits"
    table.write_text("\n".join([header, *("\t".join(map(str, row)) for row in rows)]))
    found = {
        f"{planner}long",
        f"{planner}many",
        f"{core}long",
        "tests/planner/b.py::fixture",
        "tests/planner/b.py::after it",
    }
    assert costs.with_measured({f"{planner}became short", "not run"}, table) == {*found, "not run"}


def test_listed_long_tests_exist() -> None:
    """A name without a test would hide that the test with its new name is not listed."""
    for name in sample.LONG_TESTS.read_text().splitlines():
        file, _, test = name.partition("::")
        code = (TESTS.parent / file).read_text()
        assert f"def {test.rpartition('::')[2]}(" in code, name
