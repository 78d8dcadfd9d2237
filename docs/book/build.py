"""Run the chapters of the book and write their pages: ``python docs/book/build.py [CHAPTER.py ...] [--output FOLDER]``.

A chapter is a Python program in cells, the "percent" format that Jupytext and editors open as a notebook: ``# %%``
begins a cell of code, ``# %% [markdown]`` a cell of text in comments. The page has the text, the code and what it
printed and drew. Text is a Jinja template that sees the program's variables, so that its numbers are those of the run.
Without chapters all of them are built, each in a process of its own.
"""

from __future__ import annotations

import argparse
import io
import re
import resource
import subprocess
import sys
import time
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

FOLDER = Path(__file__).resolve().parent
MARKER = re.compile(r"^# %%(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """A part of a chapter."""

    is_text: bool
    line: int
    """Line of the program at which the source begins, from 0."""
    source: str

    @property
    def text(self) -> str:
        """The comments of a cell of text, without their signs."""
        return "\n".join(line.removeprefix("#").removeprefix(" ") for line in self.source.splitlines())


def cells_of(program: str) -> list[Cell]:
    """The cells of a chapter; the lines before the first one are not part of it."""
    marks = list(MARKER.finditer(program))
    ends = [mark.start() for mark in marks[1:]] + [len(program)]
    return [
        Cell("[markdown]" in mark[1], program[: mark.end()].count("\n") + 1, program[mark.end() : end].strip("\n"))
        for mark, end in zip(marks, ends, strict=True)
    ]


def page_of(chapter: Path, pictures: Any) -> str:
    """Run a chapter and return its page."""
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(chapter)}
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    parts = []
    for cell in cells_of(chapter.read_text(encoding="utf-8")):
        if cell.is_text:
            parts.append(environment.from_string(cell.text).render(names))
            continue
        printed = io.StringIO()
        with redirect_stdout(printed):
            # The empty lines give tracebacks the line numbers of the file.
            exec(compile("\n" * cell.line + cell.source, str(chapter), "exec"), names)
        parts.append(f"```python\n{cell.source}\n```")
        if printed.getvalue():
            parts.append(f"```text\n{printed.getvalue().rstrip()}\n```")
        parts += [f"![{description}](images/{name})" for name, description in pictures.waiting]
        pictures.waiting.clear()
    return "\n\n".join(parts) + "\n"


def build(chapter: Path, output: Path) -> None:
    """Write a chapter's page and pictures below ``output``."""
    from small_runs import PICTURES

    PICTURES.folder, PICTURES.waiting = output / "images", []
    began = time.perf_counter()
    page = page_of(chapter, PICTURES)
    (output / f"{chapter.stem}.md").write_text(page, encoding="utf-8")
    used = sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"{chapter.stem}: {time.perf_counter() - began:.1f} s, {used:.1f} s of processor time", flush=True)


def chapters() -> list[Path]:
    """The programs of all chapters, in their order."""
    return sorted(FOLDER.glob("[0-9][0-9]_*.py"))


def main() -> None:
    """Build the requested chapters."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chapters", nargs="*", type=Path, help="programs; default: all")
    parser.add_argument("--output", type=Path, default=FOLDER, help="folder of the pages")
    settings = parser.parse_args()
    if len(settings.chapters) == 1:
        build(settings.chapters[0].resolve(), settings.output)
        return
    for chapter in settings.chapters or chapters():
        command = [sys.executable, __file__, str(chapter), "--output", str(settings.output)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
