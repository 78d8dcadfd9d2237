"""Functions that run when a program has imported a module: a program that does not need it starts as fast as before."""

import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_REQUESTED: set[tuple[str, Callable[[], None]]] = set()


class AfterImport:
    """Finds one module as the other finders do, with a loader that calls ``action`` when the module is complete."""

    def __init__(self, name: str, action: Callable[[], None]) -> None:
        self.name, self.action = name, action

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        """Return the place of the module; None for other modules."""
        if name != self.name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        spec = next((spec for finder in others if (spec := finder.find_spec(name, path, target)) is not None), None)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_act(module: ModuleType) -> None:
            execute(module)
            self.action()

        setattr(spec.loader, "exec_module", execute_and_act)  # noqa: B010 - mypy: a method
        return spec


def run_after_import(name: str, action: Callable[[], None]) -> None:
    """Call ``action`` now if the module ``name`` is imported, and after each import of it from now on."""
    if (name, action) in _REQUESTED:
        return
    _REQUESTED.add((name, action))
    sys.meta_path.insert(0, AfterImport(name, action))
    if name in sys.modules:
        action()
