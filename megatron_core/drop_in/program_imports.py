"""``python -m megatron_core.drop_in --check FOLDER``: the imports of ``megatron`` in a program, before it runs."""

import ast
import contextlib
import io
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

OTHERS = ("megatron.bridge", "megatron.energon")
"""Packages of other projects in the namespace ``megatron``, which are not checked."""


class Use(NamedTuple):
    """A name that a file imports; ``name`` is empty for a module."""

    file: Path
    line: int
    module: str
    name: str


def uses(root: Path, unread: list[str]) -> Iterator[Use]:
    """Yield the imports of ``megatron.*`` in a file, or in all Python files of a folder.

    Files that cannot be parsed are added to ``unread`` with the reason.
    """
    for file in sorted(root.rglob("*.py")) if root.is_dir() else [root]:
        if file.is_dir():
            continue
        if not file.is_file():  # reading a named pipe or a device may never end
            unread.append(f"not read     {file}  not a file")
            continue
        try:
            tree = ast.parse(file.read_text(errors="replace"))
        except OSError as error:
            unread.append(f"not read     {file}  {error.strerror}")
            continue
        except (SyntaxError, ValueError, RecursionError) as error:
            unread.append(f"not parsed   {file}:{getattr(error, 'lineno', None) or 1}  {error.args[0]}")
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level and node.module:
                found = [(node.module, alias.name) for alias in node.names]
            elif isinstance(node, ast.Import):
                found = [(alias.name, "") for alias in node.names]
            else:
                continue
            for module, name in found:
                whole = f"{module}.{name}.".replace("..", ".")
                if whole.startswith("megatron.") and not whole.startswith(tuple(f"{each}." for each in OTHERS)):
                    yield Use(file, node.lineno, module, name)


def status(module: str, name: str) -> str:
    """Return "missing", "unsupported" if the name raises an error that says so when it is used, or "found"."""
    from megatron_core.drop_in.unsupported import is_unsupported

    try:
        home = import_module(module)
        if name in ("", "*"):
            return "found"
        value = getattr(home, name, None) if hasattr(home, name) else import_module(f"{module}.{name}")
    except ImportError:
        return "missing"
    return "unsupported" if is_unsupported(value) else "found"


def report(root: Path) -> str:
    """Return counts of the imported names below ``root``, each counted once; and a line for each
    file that cannot be parsed, and for each name that is missing or unsupported, with the number of its imports."""
    places: dict[tuple[str, str], list[Use]] = {}
    lines: list[str] = []
    for use in uses(root, lines):
        places.setdefault((use.module, use.name), []).append(use)
    counts: Counter[str] = Counter()
    for (module, name), found in sorted(places.items(), key=lambda item: -len(item[1])):
        with contextlib.redirect_stderr(io.StringIO()):
            kind = status(module, name)
        counts[kind] += 1
        if kind != "found":
            lines.append(f"{kind:11} {len(found):4}  {module}  {name}  {found[0].file}:{found[0].line}")
    total = sum(counts.values())
    share = 100 * (total - counts["missing"]) / max(total, 1)
    summary = (
        f"{total} imported names, {share:.1f} % resolve, {counts['unsupported']} raise an error when they are used"
    )
    return "\n".join([summary, *lines])
