"""Names that packages offer and import when they are first used."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def lazy_names(package: str, file: str) -> Callable[[str], object]:
    """A ``__getattr__`` of ``package``, whose ``file`` imports the names under ``if TYPE_CHECKING``, absolutely."""
    tree = ast.parse(Path(file).read_text(encoding="utf-8"))
    late = (block for block in tree.body if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING")
    imports = (node for block in late for node in block.body if isinstance(node, ast.ImportFrom))
    homes = {name.asname or name.name: (str(node.module), name.name) for node in imports for name in node.names}

    def get(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, own = homes[name]
        found = import_module(home)
        return getattr(found, own) if hasattr(found, own) else import_module(f"{home}.{own}")

    return get


def names_of(home: str) -> Callable[[str], object]:
    """A ``__getattr__`` of a module that offers the names of the module ``home``."""
    return lambda name: getattr(import_module(home), name)
