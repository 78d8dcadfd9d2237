"""Finds the files of scripts that a script reads."""

from __future__ import annotations

import os.path
from collections.abc import Iterator
from pathlib import Path

from megatron_core.shell.unknown import UNKNOWN

MOST_FOLDERS = 4
"""Folders above the script in which a path of another machine is searched."""


def find_script(script: Path, name: str) -> tuple[Path | None, bool]:
    """Return the file that ``script`` means by ``name``, or None, and whether it is one in place of an absent file.

    A relative name is searched in the folder of the script, then in the current folder. Of a path of another machine,
    its ends are searched in the folders above the script.
    """
    folder = script.parent
    for path in (folder / name, Path(name), folder / Path(name).name):
        if _is_file(path):
            return path, False
    return next((path for path in _substitutes(folder.absolute(), Path(name)) if _is_file(path)), None), True


def _substitutes(folder: Path, path: Path) -> Iterator[Path]:
    parts = Path(os.path.normpath(path)).parts
    if UNKNOWN.search(str(path)) or ".." in parts:
        return
    for above in folder.parents[:MOST_FOLDERS]:
        for at in range(1, len(parts) - 1):
            found = above / Path(*parts[at:])
            if above != above.parent and found.resolve().is_relative_to(above.resolve()):
                yield found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # the name is too long, or a folder must not be read
        return False
