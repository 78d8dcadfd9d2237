"""Finds the files of scripts that a script reads."""

import os.path
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from megatron_core.shell.limits import LONGEST
from megatron_core.shell.unknown import UNKNOWN, readable
from megatron_core.text_file import read_text

MOST_FOLDERS = 4
"""Folders above the script whose files may be read, and in which a path of another machine is searched."""
SETTINGS = ("config", "export-kd-cfg", "heterogeneous-layers-config-path")
"""Flags of training programs with a file that is read together with the flags."""


def readable_folders(script: Path, additional: Sequence[str] = ()) -> tuple[Path, ...]:
    """The folders whose files a launch script may read.

    These are the folder of the script, the ``MOST_FOLDERS`` folders above it, the current folder and ``additional``
    ones. A home folder, and a folder that contains one, has files that no launch needs, such as keys: it is left out
    unless the script itself is in it.
    """
    folder = _resolved(script).parent
    home = _resolved(os.path.expanduser("~"))
    around = [*folder.parents[:MOST_FOLDERS], _resolved(".")]
    allowed = (folder for folder in around if folder != folder.parent and not home.is_relative_to(folder))
    return (folder, *allowed, *map(_resolved, additional))


def find_script(script: Path, name: str, folders: Sequence[Path]) -> tuple[Path | None, str]:
    """Return the file that ``script`` means by ``name``, or None, and a note if it is not this very file.

    A relative name is searched in the folder of the script, then in the current folder. Of a path of another machine,
    its ends are searched in the folders above the script. Only files in ``folders`` are found.
    """
    places = [path for path in (script.parent / name, Path(name), script.parent / Path(name).name) if _is_file(path)]
    for path in places:
        if _is_in(path, folders):
            return path, ""
    for path in _substitutes(script.parent.absolute(), Path(name)):
        if _is_file(path) and _is_in(path, folders):
            return path, f"{readable(name)} is not on this machine; {path} is read in its place"
    if places:
        return None, f"{readable(name)} is outside the folders of the script, and is not read; --read-from allows it"
    return None, f"{readable(name)} is not on this machine, so its variables are unknown"


def text_of_settings(script: Path, name: str, folders: Sequence[Path]) -> str | None:
    """The text of a JSON file that ``script`` means by ``name``, see ``find_script``; None if it cannot be read."""
    path = find_script(script, name, folders)[0] if name.endswith(".json") else None
    try:
        text = None if path is None else read_text(path)
    except (OSError, ValueError):
        return None
    return None if text is None or len(text) > LONGEST else text


def is_open(name: str, folders: Sequence[Path]) -> bool:
    """Whether a program may read the file ``name``: there is none, or it is a file in ``folders``."""
    path = Path(name)
    return not os.path.lexists(name.replace("\0", "")) or (_is_file(path) and _is_in(path, folders))


def values_of(words: Sequence[str], *flags: str) -> list[str]:
    """The first value of each of ``flags``, without hyphens before them, among ``words``."""
    values = list[str]()
    for word, following in pairwise([*words, ""]):
        flag, equals, value = word.partition("=")
        if flag.startswith("--") and flag[2:].replace("_", "-") in flags:
            values.append(value if equals else following)
    return values


def _substitutes(folder: Path, path: Path) -> Iterator[Path]:
    names = Path(os.path.normpath(path)).parts
    if UNKNOWN.search(str(path)) or ".." in names:
        return
    for above in folder.parents[:MOST_FOLDERS]:
        for start in range(1, len(names) - 1):
            substitute = above / Path(*names[start:])
            if above != above.parent and substitute.resolve().is_relative_to(above.resolve()):
                yield substitute


def _is_in(path: Path, folders: Sequence[Path]) -> bool:
    """Whether a file is in one of ``folders``, after its links are followed."""
    target = _resolved(path)
    return any(target.is_relative_to(folder) for folder in folders)


def _resolved(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name is too long or has a null character, or a folder must not be read
        return False
