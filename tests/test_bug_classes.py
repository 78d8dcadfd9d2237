"""Every known class of defect has a test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SPEC = importlib.util.spec_from_file_location("bug_class_table", ROOT / "docs" / "bug_class_table.py")
lists = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lists)

NAMES = [f"C{number}" for number in range(1, 66)]


def test_every_class_has_a_line() -> None:
    classes = lists.bug_classes()
    assert [bug.name for bug in classes] == NAMES
    assert all(bug.title for bug in classes)
    assert len({bug.title for bug in classes}) == len(classes)


def test_every_class_has_a_test() -> None:
    tests = lists.covered_by()
    assert [name for name in NAMES if name not in tests] == []


def test_references_are_to_classes_and_belong_to_tests() -> None:
    tests = lists.covered_by()
    assert [name for name in tests if name not in NAMES] == []
    lost = [label for labels in tests.values() for label in labels if label.endswith("::None")]
    assert lost == [], "move these comments to the tests that they speak of"


def test_the_page_is_up_to_date() -> None:
    page = lists.PAGE.read_text()
    assert page.count(lists.BEGIN) == page.count(lists.END) == 1
    assert page == lists.with_table(page), "run: python docs/bug_class_table.py"


EXAMPLE = '''
ROWS = {
    "one": 1,
    "two": (
        2,
    ),  # %s
}
def _helper():
    pass  # %s
@parametrize("row", ROWS)
def test_a(row):
    pass
def test_b():
    """Docstring. # %s %s"""
# %s
def test_c(): pass
# %s
'''


@pytest.mark.parametrize(
    ("place", "test"),
    [(0, "test_a[two]"), (1, "test_a"), (2, "test_b"), (3, "test_b"), (4, "test_c"), (5, None)],
)
def test_a_comment_finds_its_test(place: int, test: str | None) -> None:
    source = EXAMPLE % tuple(NAMES[40:46])
    assert dict(lists.references(source))[NAMES[40 + place]] == test


TABLES = """
ROWS = {"one": 1, "two": 2}  # %s
DEFECTS = (
    Defect(
        "a sum is left out",
        2,
    ),  # %s
    Defect("another", 3),
)
"""


def test_a_comment_in_a_file_of_tables_finds_its_row() -> None:
    source = TABLES % tuple(NAMES[40:42])
    assert dict(lists.references(source)) == {NAMES[40]: "[two]", NAMES[41]: "[a sum is left out]"}


def test_bugs_of_others_name_what_finds_them() -> None:
    """Each bug has planted defects or tests that exist, and a time, or a reason why there are none."""
    defects = lists.planted_defects()
    for bug in lists.bugs_of_others():
        assert bug.reason or (bug.when and (bug.defects or bug.tests)), bug
        assert [title for title in bug.defects if title not in defects] == [], bug
        for test in bug.tests:
            path, _, name = test.partition("::")
            assert f"def {name}(" in (ROOT / path).read_text(), bug
    sources = " ".join(bug.source for bug in lists.bugs_of_others())
    assert [n for n in range(1, 13) if f"Megatron-LM 7452 finding {n}" not in sources] == []
    assert sources.count("TTrace") == 13  # fourteen bugs: issues 1464 and 1465 share a line
    issues = (
        "DS-1801 DS-5794 pt-104336 x-jxmnop forum-84911 transformers-33844 stackoverflow-67180955 pt-51800 pt-84803"
    )
    assert [name for name in f"{issues} pt-96600 baichuan2-86".split() if name not in sources] == []


def test_page_of_others_has_the_table_of_today() -> None:
    page = lists.PAGE_OF_OTHERS.read_text()
    assert page == lists.with_table(page, lists.table_of_others()), "run python docs/bug_class_table.py"
