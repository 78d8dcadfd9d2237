"""Modules of Megatron-LM and DeepSpeed that only have names of other modules, or names that are not supported.

Most programs import a few of them. ``named_modules.yaml`` lists the names; a file for each would say no more.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_core.drop_in.unsupported import unsupported, unsupported_class

FOLDER = Path(__file__).parent
OURS = ("megatron.core", "megatron.inference", "megatron.legacy", "megatron.post_training", "megatron.rl")
PREFIXES = ("deepspeed.", "megatron.training.", *(name for ours in OURS for name in (ours, f"{ours}.")))


@cache
def _tables() -> dict[str, Any]:
    from megatron_core.text_file import read_table  # imports yaml: not at the start of every process

    tables: dict[str, Any] = read_table(__file__)
    return tables


@cache
def _modules() -> frozenset[str]:
    """All modules of the table, and the packages around them."""
    tables = _tables()
    listed = {*tables["elsewhere"], *tables["absent"]}.union(*tables["unsupported"].values())
    parts = [name.split(".") for name in listed]
    return frozenset(".".join(names[:length]) for names in parts for length in range(2, len(names) + 1))


def find_named_module(name: str) -> ModuleSpec | None:
    """The specification of a module of the table; None for modules with files."""
    if not name.startswith(PREFIXES):
        return None
    path = FOLDER.joinpath(*name.split("."))
    if name not in _modules() or path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
        return None
    spec = ModuleSpec(name, NamedModule(), is_package=True)
    spec.submodule_search_locations = [str(path)]
    return spec


class NamedModule(Loader):
    """Loader of a module of the table."""

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return None: the module is an ordinary one. Errors: ``ImportError`` for a module that is absent."""
        instead = _tables()["absent"].get(spec.name)
        if instead is not None:
            raise ImportError(f"{spec.name} is not available in megatron_core.drop_in: {instead}", name=spec.name)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Set the names of the module."""
        name = module.__name__
        rows = _tables()["elsewhere"].get(name, [])
        for row in [rows] if isinstance(rows, str) else rows:
            source, *words = row.split()
            for word in words:
                new, _, old = word.partition("=")
                setattr(module, new, _named(source, old or new))
        for message, modules in _tables()["unsupported"].items():
            for word in modules.get(name, "").split():
                is_function = word.endswith("()")
                refusal = unsupported(message) if is_function else unsupported_class(f"{name}.{word}", message)
                setattr(module, word.removesuffix("()"), refusal)


def _named(source: str, name: str) -> Any:
    """A name of the module ``source``, or a module in it."""
    home = import_module(source)
    return getattr(home, name) if hasattr(home, name) else import_module(f"{source}.{name}")
