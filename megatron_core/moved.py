"""Import modules by the names that they had in the version before, with a note."""

import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "megatron_core"


def _table(file_name: str) -> dict[str, str]:
    """Pairs of an old and a new name; a line of the file has both."""
    return dict(line.split() for line in Path(__file__).with_name(file_name).read_text("ascii").splitlines())


MOVED = _table("moved_modules.txt")
"""New names of modules and packages by old ones, without the package's name. Names that begin with ``megatron.`` are
those of the drop-in."""
MOVED_NAMES = _table("moved_names.txt")
"""Names that a package exported in the version before, and the modules that define them now."""


def full_name(name: str) -> str:
    """The name by which a module of ``MOVED`` or ``MOVED_NAMES`` is imported; the drop-in finds those of Megatron."""
    if not name.startswith("megatron."):
        return f"{PACKAGE}.{name}"
    importlib.import_module(f"{PACKAGE}.drop_in")
    return name


def new_name(module: str) -> str | None:
    """Today's name of a module with an old name; None for every other module."""
    path = module.split(".")
    if path[0] != PACKAGE:
        return None
    for length in range(len(path), 1, -1):
        target = MOVED.get(".".join(path[1:length]))
        if target is not None:
            return ".".join([full_name(target), *path[length:]])
    return None


class _NewModule(Loader):
    """Returns the module with the new name instead of loading a second copy."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        warnings.warn(f"{spec.name} has moved to {self.name}; import it from there", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self.name)
        self.spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The import system has replaced the module's own specification by that of the old name.
        module.__spec__ = self.spec


class OldNames(MetaPathFinder):
    """Finds modules by their old names. It comes first: a moved package's path would find its modules twice."""

    def find_spec(self, fullname: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        """A specification that returns the module with the new name; None for names that did not move."""
        name = new_name(fullname)
        return None if name is None else ModuleSpec(fullname, _NewModule(name))


def install() -> None:
    """Let old names work in this process."""
    if not any(isinstance(finder, OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OldNames())


def old_names_of(package: str, names: Callable[[str], Any] | None = None) -> Callable[[str], Any]:
    """A function ``__getattr__`` of a package that finds names it exported before, with a note.

    ``names`` finds the package's other names.
    """

    def find(name: str) -> Any:
        module = MOVED_NAMES.get(f"{package.removeprefix(f'{PACKAGE}.')}.{name}")
        if module is None and names is not None:
            return names(name)
        if module is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = full_name(module)
        note = f"{package}.{name} has moved to {module}; import it from there"
        warnings.warn(note, DeprecationWarning, stacklevel=2)
        return getattr(importlib.import_module(module), name)

    return find
