"""Modules and lines that an import loads, and imports of features by the core."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.structure.parts import PACKAGE, ROOT, is_core, modules, part_of


@cache
def tree(path: Path) -> ast.Module:
    """The syntax tree of a file."""
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of the syntax tree of a file."""
    return tuple(ast.walk(tree(path)))


@cache
def lines_of(path: Path) -> int:
    """The number of lines of a file."""
    return len(path.read_text().splitlines())


def statements_run_by_import(path: Path) -> Iterator[ast.stmt]:
    """Import statements outside of functions and of ``if TYPE_CHECKING``."""
    to_visit: list[ast.AST] = [tree(path)]
    while to_visit:
        node = to_visit.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            to_visit += node.orelse
            continue
        to_visit += ast.iter_child_nodes(node)


def every_import(path: Path) -> Iterator[ast.stmt]:
    """All import statements of a file, also those in functions and for type checkers."""
    return (node for node in nodes(path) if isinstance(node, ast.Import | ast.ImportFrom))


@cache
def lazy_names() -> dict[str, str]:
    """Names that packages import on first use, by their stubs, and the modules that define them."""
    modules_of_names: dict[str, str] = {}
    for path in (ROOT / PACKAGE).rglob("__init__.pyi"):
        package = ".".join(path.parent.relative_to(ROOT).parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.level == 1:
                modules_of_names |= {f"{package}.{alias.name}": f"{package}.{node.module}" for alias in node.names}
    return modules_of_names


def imported_modules(statements: Iterator[ast.stmt]) -> set[str]:
    """The modules of the package that ``statements`` import, without their parent packages."""
    names: set[str] = set()
    for node in statements:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            candidates = {f"{node.module}.{alias.name}" for alias in node.names}
            candidates = {lazy_names().get(name, name) for name in candidates}
            submodules = {name for name in candidates if name.removeprefix(f"{PACKAGE}.") in modules()}
            names |= submodules
            names |= {str(node.module)} if submodules != candidates else set()
    short = {name.removeprefix(f"{PACKAGE}.") for name in names if name.startswith(f"{PACKAGE}.")}
    return short & set(modules())


def loaded_by(*starts: str) -> set[str]:
    """The modules that importing ``starts`` loads, with their parent packages."""
    loaded: set[str] = set()
    waiting = list(starts)
    while waiting:
        module = waiting.pop()
        if module in loaded:
            continue
        loaded.add(module)
        waiting += imported_modules(statements_run_by_import(modules()[module]))
        if "." in module:
            waiting.append(module.rpartition(".")[0])
    return {module for module in loaded if module in modules()}


def total_lines(names: set[str]) -> int:
    """The number of lines of modules."""
    return sum(lines_of(modules()[name]) for name in names)


def core_modules() -> set[str]:
    """All modules of the core."""
    return {module for module in modules() if is_core(module)}


def number_of_arrows() -> int:
    """The number of pairs of a core module and an optional module that it imports."""
    return sum(map(len, arrows_to_features().values()))


def arrows_to_features() -> dict[str, list[str]]:
    """Imports of features and satellites by modules of the core, also imports in functions, by importing module."""
    arrows: dict[str, list[str]] = {}
    for module in sorted(core_modules()):
        targets = sorted(imported_modules(every_import(modules()[module])))
        optional = [target for target in targets if part_of(target) != "core"]
        if optional:
            arrows[module] = optional
    return arrows
