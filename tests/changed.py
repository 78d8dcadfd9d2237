"""The folders of tests that a change concerns, for ``make test-changed``: ``python -m tests.changed BASE``.

Tests mirror the package. A change of a feature or of a satellite concerns the tests of its folder; one of the core,
of a module below ``tests`` that other tests use, or of the build concerns all tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.structure.parts import is_core, name_of

ROOT = Path(__file__).parents[1]
EVERYTHING = "tests"
MIRRORED = ("benchmarks", "docs", "examples", "tools")
"""Folders next to the package whose tests have a folder of the same name."""


def changed_files(base: str) -> list[str]:
    """Files that differ from the commit ``base``, also those that are not committed yet."""
    commands = (["diff", "--name-only", base], ["ls-files", "--others", "--exclude-standard"])
    names: list[str] = []
    for command in commands:
        listing = subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout
        names += listing.splitlines()
    return names


def folder_of(name: str) -> str | None:
    """The folder or file of tests that a changed file concerns; None if it concerns none."""
    path = Path(name)
    first = path.parts[0]
    if first == "tests":
        return _folder_of_a_test(path)
    if first == "megatron_core" and path.suffix in (".py", ".pyi"):
        return _folder_of_a_module(path)
    if first == "csrc":
        return "tests/ops"
    if first in MIRRORED:
        return f"tests/{first}"
    return "tests/docs" if path.suffix == ".md" else EVERYTHING


def _folder_of_a_test(path: Path) -> str:
    if len(path.parts) == 2:
        is_test = path.name.startswith("test_")
        return str(path) if is_test else EVERYTHING
    return _existing(path.parent)


def _folder_of_a_module(path: Path) -> str:
    if is_core(name_of(ROOT / path.with_suffix(".py"))):
        return EVERYTHING
    return _existing(Path("tests", *path.parent.parts[1:]))


def _existing(folder: Path) -> str:
    """The deepest folder on the way to ``folder`` that has tests."""
    while not (ROOT / folder).is_dir():
        folder = folder.parent
    return str(folder)


def changed_folders(names: list[str]) -> list[str]:
    """The folders of tests that changed files concern, without those that lie in others of them."""
    folders = {folder for name in names if (folder := folder_of(name)) is not None}
    existing = {folder for folder in folders if (ROOT / folder).exists()}
    return sorted(
        folder
        for folder in existing
        if not any(other != folder and Path(folder).is_relative_to(other) for other in existing)
    )


if __name__ == "__main__":
    print(*changed_folders(changed_files(sys.argv[1])))
