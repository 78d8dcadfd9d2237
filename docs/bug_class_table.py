"""The tables of known defects and the tests that would catch them: ``python docs/bug_class_table.py``.

Titles come from ``docs/bug_classes.csv``; tests name the classes that they cover in comments such as ``C17`` after a
``#``. A comment belongs to the test function around it, or else to the next one below it; at a row of a table of cases,
such as ``ROWS`` of the parity matrix, to that row. Run as a program, this writes the table into
``docs/verification.md``, and that of ``docs/bugs_of_others.csv`` into ``docs/bugs_of_others.md``, between the markers.
"""

from __future__ import annotations

import ast
import csv
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "verification.md"
PAGE_OF_OTHERS = ROOT / "docs" / "bugs_of_others.md"
BEGIN, END = "<!-- bug classes: begin -->", "<!-- bug classes: end -->"

COMMENT = re.compile(r"#.*?\bC\d+\b.*")
CLASS = re.compile(r"\bC\d+\b")
KINDS = ("defect", "test", "impossible", "unknown")
"""Kinds of entries for a published bug: a planted defect, a test, or a reason why there is none."""


class BugClass(NamedTuple):
    """A line of the csv: what goes wrong."""

    name: str
    title: str


def bug_classes() -> list[BugClass]:
    """All classes, in their order."""
    with (ROOT / "docs" / "bug_classes.csv").open(newline="") as file:
        return [BugClass(row["class"], row["title"]) for row in csv.DictReader(file)]


def references(source: str) -> Iterator[tuple[str, str | None]]:
    """Pairs (class, test that its comment belongs to) of a test file; None where no test is found."""
    tree = ast.parse(source)
    for number, line in enumerate(source.splitlines(), 1):
        for comment in COMMENT.findall(line):
            for name in CLASS.findall(comment):
                yield name, owner(tree, number)


def owner(tree: ast.Module, line: int) -> str | None:
    """The test that a comment on ``line`` belongs to."""
    row = table_row(tree, line)
    if row is not None:
        return row
    below = [test for test in tests_of(tree) if test.end_lineno >= line]
    return below[0].name if below else None


def table_row(tree: ast.Module, line: int) -> str | None:
    """``test[row]`` if the line is in a table at module level from whose name a test draws its cases; ``[row]`` in a
    file of tables alone."""
    for node in tree.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or not node.lineno <= line <= node.end_lineno:
            continue
        table = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
        begun = [name for name, start in rows_of(node.value) if start <= line]
        users = [test.name for test in tests_of(tree) if any(uses(d, table) for d in test.decorator_list)]
        if begun and (users or not tests_of(tree)):
            return f"{users[0] if users else ''}[{begun[-1]}]"
    return None


def rows_of(table: ast.expr | None) -> Iterator[tuple[str, int]]:
    """Name and first line of each row: the keys of a dict, or what the calls in a tuple or list have as their first
    argument."""
    if isinstance(table, ast.Dict):
        yield from ((key.value, key.lineno) for key in table.keys if isinstance(key, ast.Constant))
    elif isinstance(table, ast.Tuple | ast.List):
        for row in table.elts:
            if isinstance(row, ast.Call) and row.args and isinstance(row.args[0], ast.Constant):
                yield str(row.args[0].value), row.lineno


def tests_of(tree: ast.Module) -> list[ast.FunctionDef]:
    """The test functions of a file, from top to bottom."""
    return [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]


def uses(node: ast.AST, name: str) -> bool:
    """Whether an expression reads the variable ``name``."""
    return any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))


def covered_by() -> dict[str, list[str]]:
    """Tests by class, as ``tests/path.py::test``."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for name, test in references(path.read_text()):
            where = path.relative_to(ROOT).as_posix()
            label = f"{where}{test}" if test and test.startswith("[") else f"{where}::{test}"
            if label not in found[name]:
                found[name].append(label)
    return dict(found)


def table() -> str:
    """The table in Markdown."""
    tests = covered_by()
    lines = ["| class | defect | covered by |", "|---|---|---|"]
    for bug in bug_classes():
        cell = "<br>".join(map(_code, tests.get(bug.name, [])))
        lines.append(f"| {bug.name} | {bug.title} | {cell} |")
    return "\n".join(lines)


def _code(text: str) -> str:
    """``text`` as code in a cell of a table, which a vertical line would end."""
    return f"`{text}`" if "|" not in text else f"<code>{text.replace('|', '&#124;')}</code>"


class OthersBug(NamedTuple):
    """A line of ``bugs_of_others.csv``: a published bug of another project."""

    source: str
    bug: str
    defects: list[str]
    """Titles of planted defects."""
    tests: list[str]
    """Tests, as ``tests/path.py::test``."""
    reason: str
    """Why it is impossible here, or what is not known of it; "" otherwise."""
    when: str
    """How soon it is found."""


def bugs_of_others() -> list[OthersBug]:
    """All published bugs, in their order."""
    with (ROOT / "docs" / "bugs_of_others.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    found = []
    for row in rows:
        parts = [part.partition(": ") for part in re.split(rf"; (?=(?:{'|'.join(KINDS)}): )", row["found by"])]
        by = {kind: [text for each, _, text in parts if each == kind] for kind in KINDS}
        assert sum(map(len, by.values())) == len(parts), f"{row['source']}: begin each part with one of {KINDS}"
        reason = " ".join([*(f"nowhere: {text}" for text in by["impossible"]), *by["unknown"]])
        found.append(OthersBug(row["source"], row["bug"], by["defect"], by["test"], reason, row["when"]))
    return found


def planted_defects() -> dict[str, tuple[str, str]]:
    """Target and parity row of each planted defect by its title."""
    found = {}
    for path in sorted((ROOT / "tests" / "defects").glob("in_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Defect":
                values = [ast.literal_eval(each) for each in node.args if isinstance(each, ast.Constant)]
                found[values[0]] = (values[1], values[-1])
    return found


def table_of_others() -> str:
    """The table of published bugs in Markdown."""
    defects = planted_defects()
    lines = ["| bug | source | place in this code | found by | when |", "|---|---|---|---|---|"]
    for bug in bugs_of_others():
        places = dict.fromkeys(f"`{defects[title][0]}`" for title in bug.defects)
        finders = [f"planted: {title}" for title in bug.defects] + [f"`{test}`" for test in bug.tests]
        where = "<br>".join([*places, *([bug.reason] if bug.reason else [])])
        lines.append(f"| {bug.bug} | {bug.source} | {where} | {'<br>'.join(finders)} | {bug.when} |")
    return "\n".join(lines)


def with_table(page: str, content: str | None = None) -> str:
    """``page`` with the table of today, or ``content``, between its markers."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table() if content is None else content}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    PAGE_OF_OTHERS.write_text(with_table(PAGE_OF_OTHERS.read_text(), table_of_others()))
