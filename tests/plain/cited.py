"""The settings that a test sets, read from its source and from what it uses of the folder ``tests``."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
COMPUTED = object()
"""A value that only running the test shows."""


@cache
def settings_set(path: str, function: str) -> dict[str, list[Any]]:
    """Names with values that a test, and all that it uses, writes: keyword arguments, keys, and flags ``--name``."""
    values: dict[str, list[Any]] = {}
    for node in _used(path, function):
        for name, value in _written(node):
            values.setdefault(name, []).append(value)
    return values


def _used(path: str, function: str) -> Iterator[ast.AST]:
    """The statements that define a test, and transitively all names of the tests that they contain."""
    seen: set[tuple[str, str]] = set()
    waiting = [(path, function)]
    while waiting:
        place, name = waiting.pop()
        if (place, name) in seen:
            continue
        seen.add((place, name))
        definitions, imports = _module(place)
        for statement in definitions.get(name, ()):
            yield statement
            waiting += [(place, used) for used in _names(statement) if used in definitions or used in imports]
        if name in imports:
            waiting.append(imports[name])


def _names(statement: ast.AST) -> set[str]:
    """Names in a statement; of ``module.name`` both; arguments, too, which may be fixtures."""
    names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    names |= {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
    return names | {node.arg for node in ast.walk(statement) if isinstance(node, ast.arg)}


@cache
def _module(path: str) -> tuple[dict[str, list[ast.stmt]], dict[str, tuple[str, str]]]:
    """The definitions of a file by name, and its imports from the tests: name, and the file and name there."""
    definitions: dict[str, list[ast.stmt]] = {}
    imports: dict[str, tuple[str, str]] = {}
    for statement in ast.parse((ROOT / path).read_text()).body:
        for name in _defined(statement):
            definitions.setdefault(name, []).append(statement)
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith("tests"):
            for alias in statement.names:
                place = "/".join((statement.module or "").split("."))
                if (ROOT / f"{place}/{alias.name}.py").exists():  # a module
                    imports |= {
                        name: (f"{place}/{alias.name}.py", name) for name in _public(f"{place}/{alias.name}.py")
                    }
                elif (ROOT / f"{place}.py").exists():
                    imports[alias.asname or alias.name] = (f"{place}.py", alias.name)
    return definitions, imports


def _public(path: str) -> set[str]:
    return {name for statement in ast.parse((ROOT / path).read_text()).body for name in _defined(statement)}


def _defined(statement: ast.stmt) -> set[str]:
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return {statement.name}
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return {
        node.id for target in targets if target is not None for node in ast.walk(target) if isinstance(node, ast.Name)
    }


def _written(statement: ast.AST) -> Iterator[tuple[str, Any]]:
    """Names and values in a statement."""
    for node in ast.walk(statement):
        if isinstance(node, ast.keyword) and node.arg is not None:
            yield node.arg, _value(node.value)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(key.value, str):
                    yield key.value, _value(value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for word in node.value.split():
                if word.startswith("--"):
                    yield word[2:].partition("=")[0].replace("-", "_"), COMPUTED
                elif word.isidentifier():
                    yield f"word {word}", COMPUTED


def _value(node: ast.expr) -> Any:
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return COMPUTED
    return tuple(value) if isinstance(value, list) else value
