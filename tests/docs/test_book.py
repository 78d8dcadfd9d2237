"""The pages of docs/book are what their programs print: one of them in ``make test``, all in ``make verify-all``."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BOOK = ROOT / "docs" / "book"
SPEC = importlib.util.spec_from_file_location("book_builder", BOOK / "build.py")
assert SPEC is not None and SPEC.loader is not None
builder = importlib.util.module_from_spec(SPEC)
sys.modules[SPEC.name] = builder  # its dataclass looks itself up
SPEC.loader.exec_module(builder)
CHAPTERS = builder.chapters()
MEASURED = {"10_precision", "15_reading_a_trace"}
"""Chapters with numbers of less than 64 bits, or times, which differ between machines."""
SHORT = {"03_zero"}
"""A chapter that takes a few seconds, and whose numbers are defined: state and traffic, but no saved activations."""
EXPERIMENT = re.compile(
    r"^# .*?[Cc]hange `([\w, ]+ = .+?)`\s+(?:# )?to\s+(?:# )?`([\w, ]+ = .+?)`", re.MULTILINE | re.DOTALL
)


def _build(chapter: Path, output: Path) -> str:
    """The page that the builder writes."""
    command = [sys.executable, str(BOOK / "build.py"), str(chapter), "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": f"{BOOK}{os.pathsep}{ROOT}"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=500)
    assert result.returncode == 0, result.stderr
    return (output / f"{chapter.stem}.md").read_text(encoding="utf-8")


COMPARED = [
    pytest.param(chapter, marks=() if chapter.stem in SHORT else pytest.mark.whole_matrix, id=chapter.stem)
    for chapter in CHAPTERS
    if chapter.stem not in MEASURED
]


@pytest.mark.parametrize("chapter", COMPARED)
def test_a_chapter_prints_its_page(chapter: Path, tmp_path: Path) -> None:
    assert _build(chapter, tmp_path) == (BOOK / f"{chapter.stem}.md").read_text(encoding="utf-8"), "run: make book"
    for picture in (tmp_path / "images").glob("*"):
        assert (BOOK / "images" / picture.name).is_file()


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_a_page_has_its_program(chapter: Path) -> None:
    """Each page has the code, the headings and the pictures of its program, in their order."""
    program, page = chapter.read_text(encoding="utf-8"), (BOOK / f"{chapter.stem}.md").read_text(encoding="utf-8")
    cells = builder.cells_of(program)
    assert [cell.source for cell in cells if not cell.is_text] == re.findall(r"```python\n(.*?)\n```", page, re.DOTALL)
    headings = [line for cell in cells if cell.is_text for line in cell.text.splitlines() if line.startswith("#")]
    assert headings == [
        line for line in re.sub(r"```.*?```", "", page, flags=re.DOTALL).splitlines() if line[:1] == "#"
    ]
    assert re.match(r"# \d+\. ", headings[0]) and "## Experiment" in headings
    for picture in re.findall(r"!\[.*?\]\((.*?)\)", page):
        assert 1_000 < (BOOK / picture).stat().st_size < 150_000


@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_an_experiment_changes_a_line_of_the_program(chapter: Path) -> None:
    _changed(chapter)


@pytest.mark.whole_matrix
@pytest.mark.parametrize("chapter", CHAPTERS, ids=lambda path: path.stem)
def test_an_experiment_runs(chapter: Path, tmp_path: Path) -> None:
    changed = tmp_path / chapter.name
    changed.write_text(_changed(chapter), encoding="utf-8")
    assert _build(changed, tmp_path) != (BOOK / f"{chapter.stem}.md").read_text(encoding="utf-8")


def _changed(chapter: Path) -> str:
    """The program with the change that its experiment proposes."""
    program = chapter.read_text(encoding="utf-8")
    experiment = EXPERIMENT.search(program, program.index("# ## Experiment"))
    assert experiment is not None, "an experiment says: change `NAME = value` to `NAME = value`"
    before, after = (re.sub(r"\n# ", " ", line) for line in experiment.groups())
    lines = program.splitlines()
    assert lines.count(before) == 1 and before != after
    return "\n".join(after if line == before else line for line in lines) + "\n"


def test_numbers_of_a_text_come_from_its_program(tmp_path: Path) -> None:
    """The builder fills in values, and ends at an unknown name."""
    chapter = tmp_path / "00_test.py"
    chapter.write_text("# %% [markdown]\n# # A\n# %%\nx = 3\nprint(x)\n# %% [markdown]\n# {{ x + 1 }} ranks\n")
    page = _build(chapter, tmp_path)
    assert page == "# A\n\n```python\nx = 3\nprint(x)\n```\n\n```text\n3\n```\n\n4 ranks\n"
    chapter.write_text("# %% [markdown]\n# {{ y }}\n")
    with pytest.raises(AssertionError, match="'y' is undefined"):
        _build(chapter, tmp_path)
