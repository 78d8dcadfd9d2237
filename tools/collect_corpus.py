"""Collect the text files of a folder as JSON Lines, one document a file.

python tools/collect_corpus.py --output corpus.jsonl
python tools/collect_corpus.py --folder ~/notes --output corpus.jsonl

Without a folder it takes the source of Python's standard library, about 9 MB.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import tyro

from megatron_core.datasets.aside import aside, writing_aside
from megatron_core.errors import DataError, MegatronError

LIBRARY_PATTERNS = ("*.py",)
FOLDER_PATTERNS = ("*.txt", "*.md", "*.py")

# Installed, built or fetched by programs, so not what the owner of a folder means by its text.
SKIPPED = {"__pycache__", "node_modules", "site-packages", "dist-packages"}
# Tests: a third of the standard library, repetitive, and with files that are broken on purpose. Encodings and
# topics: tables that programs wrote, so regular that a batch's loss depends more on their share in it than on
# the model.
SKIPPED_IN_LIBRARY = {"test", "tests", "idlelib", "idle_test", "lib2to3", "encodings", "pydoc_data"}

NAMES_SHOWN = 5


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Collect the text files of a folder as JSON Lines, one document a file."""

    output: str
    """The JSON Lines file to write."""
    folder: str | None = None
    """Folder to read, with all below it; default: the standard library of this Python."""
    pattern: tuple[str, ...] = ()
    """Names of files to take, as globs in quotes; default *.txt *.md *.py (the standard library: *.py)."""


def find(folder: Path, patterns: Sequence[str], skipped: set[str]) -> Iterator[Path]:
    """The files below a folder whose names fit a pattern, sorted; not in hidden or linked folders."""
    for parent, folders, names in os.walk(folder):
        # In place: os.walk then goes down to these alone, in this order.
        folders[:] = sorted(name for name in folders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(parent, name)
            if any(fnmatch(name, pattern) for pattern in patterns) and path.is_file():
                yield path


def collect(settings: Settings) -> None:
    """Write every file that is text, and say which are not."""
    folder = Path(settings.folder or sysconfig.get_paths()["stdlib"])
    if not folder.is_dir():
        raise DataError(f"--folder {folder} is no folder; give one that holds text files")
    patterns = settings.pattern or (FOLDER_PATTERNS if settings.folder else LIBRARY_PATTERNS)
    skipped = SKIPPED if settings.folder else SKIPPED | SKIPPED_IN_LIBRARY
    # Patterns may fit the output itself, of an earlier run or of this one.
    own = {Path(settings.output).resolve(), aside(settings.output).resolve()}
    documents = size = 0
    undecodable: list[str] = []
    with writing_aside(settings.output) as file:
        for path in find(folder, patterns, skipped):
            if path.resolve() in own:
                continue
            name = path.relative_to(folder).as_posix()
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                undecodable.append(name)
                continue
            if text.strip():
                line = json.dumps({"text": text, "path": name}, ensure_ascii=False)
                size += file.write(line.encode("utf-8") + b"\n")
                documents += 1
        if undecodable:
            print(left_out(undecodable), file=sys.stderr)
        if not documents:
            raise DataError(
                f"--folder {folder} holds no text in files named {' '.join(patterns)} (folders named "
                f"{', '.join(sorted(skipped))} are passed over); choose with --pattern, or name a folder below those"
            )
    print(f"{settings.output}: {documents:,} documents, {size / 1e6:.1f} MB", flush=True)


def left_out(names: Sequence[str]) -> str:
    """The line about files that are not UTF-8: how many, and the first of them."""
    shown = ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
    return f"left out, not UTF-8: {len(names)} files: {shown}"


def main() -> None:
    """Parse the flags and run; one line on stderr and status 1 for an error that has a way out."""
    settings = tyro.cli(Settings, description=__doc__)
    try:
        collect(settings)
    except (MegatronError, OSError) as error:
        sys.exit(f"collect_corpus: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
