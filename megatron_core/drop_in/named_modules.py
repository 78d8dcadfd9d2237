"""Names of Megatron-LM and DeepSpeed that are those of other modules, are constant, or are not supported.

Most programs import a few of them. ``named_modules.yaml`` lists the names; a file for each module would say no more. A
module that has a file, too, gets the names of the table after its own.
"""

from functools import cache
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron_core.drop_in.unsupported import constant_function, unsupported, unsupported_class

FOLDER = Path(__file__).parent
PACKAGES = ("core", "inference", "legacy", "post_training", "rl", "training")
PREFIXES = ("deepspeed.", *(f"megatron.{package}{dot}" for package in PACKAGES for dot in ("", ".")))


@cache
def _tables() -> dict[str, Any]:
    from megatron_core.text_file import read_table  # imports yaml: not at the start of every process

    return read_table(__file__)


@cache
def _listed() -> frozenset[str]:
    """The modules of the table."""
    tables = _tables()
    return frozenset().union(tables["elsewhere"], tables["absent"], tables["values"], *_by_text(tables).values())


def _by_text(tables: dict[str, Any]) -> dict[str, dict[str, str]]:
    """The names of both kinds of stand-ins: a text, and modules with names."""
    return tables["unsupported"] | tables["constant_functions"]


@cache
def _modules() -> frozenset[str]:
    """The modules of the table, and the packages around them."""
    parts = [name.split(".") for name in _listed()]
    return frozenset(".".join(names[:length]) for names in parts for length in range(2, len(names) + 1))


def find_named_module(name: str) -> ModuleSpec | None:
    """The specification of a module of the table; None for other modules."""
    if not name.startswith(PREFIXES) or name not in _modules():
        return None
    path = FOLDER.joinpath(*name.split("."))
    if path.with_suffix(".py").is_file() or (path / "__init__.py").is_file():
        return _completed(name, path.parent) if name in _listed() else None
    spec = ModuleSpec(name, NamedModule(), is_package=True)
    spec.submodule_search_locations = [str(path)]
    return spec


def _completed(name: str, folder: Path) -> ModuleSpec | None:
    """The specification of a module with a file, whose loader adds the names of the table."""
    spec = PathFinder.find_spec(name, [str(folder)])
    assert spec is not None and spec.loader is not None, "the file exists"
    execute = spec.loader.exec_module

    def execute_and_complete(module: ModuleType) -> None:
        execute(module)
        set_names(module)

    setattr(spec.loader, "exec_module", execute_and_complete)  # noqa: B010 - mypy: a method
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
        set_names(module)


def set_names(module: ModuleType) -> None:
    """Set the names that the table has for a module."""
    name, tables = module.__name__, _tables()
    rows = tables["elsewhere"].get(name, [])
    for row in [rows] if isinstance(rows, str) else rows:
        source, *words = row.split()
        for word in words:
            new, _, old = word.partition("=")
            setattr(module, new, _named(source, old or new))
    for new, value in tables["values"].get(name, {}).items():
        setattr(module, new, value)
    for reason, modules in tables["constant_functions"].items():
        for word in modules.get(name, "").split():
            new, _, value = word.partition("=")
            setattr(module, new, constant_function(new, _CONSTANTS[value], reason))
    for message, modules in tables["unsupported"].items():
        for word in modules.get(name, "").split():
            is_function = word.endswith("()")
            refusal = unsupported(message) if is_function else unsupported_class(f"{name}.{word}", message)
            setattr(module, word.removesuffix("()"), refusal)


_CONSTANTS = {"": None, "0": 0, "False": False, "True": True}


def _named(source: str, name: str) -> Any:
    """A name of the module ``source``, or a module in it."""
    home = import_module(source)
    return getattr(home, name) if hasattr(home, name) else import_module(f"{source}.{name}")
