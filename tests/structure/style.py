"""Measures of readability: names, comments, docstrings, numbers of parameters, and names that exist twice."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from tests.structure.imports import nodes, tree
from tests.structure.parts import is_below, modules

VAGUE = frozenset(
    (
        *("found", "own", "each", "given", "held", "made", "shown", "at", "others", "further", "rest", "whole", "part"),
        *(
            "parts",
            "said",
            "kept",
            "called",
            "last",
            "begun",
            "here",
            "place",
            "way",
            "kind",
            "marked",
            "asked",
            "used",
        ),
    )
)
"""Names of variables that do not say what they hold."""
LONG_DOCSTRING = 100
"""Words above which a docstring is a page of documentation."""


def vague_names(paths: Iterable[Path]) -> float:
    """The share of vague names among assigned variables and parameters."""
    names = [name for path in paths for name in _assigned(tree(path))]
    return sum(name in VAGUE for name in names) / max(len(names), 1)


def _assigned(module: ast.Module) -> list[str]:
    stored = [node.id for node in ast.walk(module) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)]
    return stored + [node.arg for node in ast.walk(module) if isinstance(node, ast.arg)]


def double_assignments(paths: Iterable[Path]) -> int:
    """Statements that assign separate values to several variables: ``a, b = 1, 2``."""
    return sum(
        isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(isinstance(target, ast.Tuple) for target in node.targets)
        for path in paths
        for node in nodes(path)
    )


def nested_conditional_expressions(paths: Iterable[Path]) -> int:
    """Conditional expressions with another one as a branch."""
    return sum(
        isinstance(node, ast.IfExp) and any(isinstance(branch, ast.IfExp) for branch in (node.body, node.orelse))
        for path in paths
        for node in nodes(path)
    )


def comment_share(paths: Iterable[Path]) -> float:
    """The share of lines that have only a comment."""
    comments, lines = 0, 0
    for path in paths:
        text = path.read_text()
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments += sum(token.type == tokenize.COMMENT and token.line.lstrip().startswith("#") for token in tokens)
        lines += len(text.splitlines())
    return comments / max(lines, 1)


def long_docstrings(paths: Iterable[Path]) -> list[str]:
    """Modules, classes and functions whose docstring has more than ``LONG_DOCSTRING`` words."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return [
        f"{path.name}: {getattr(node, 'name', 'module')}"
        for path in paths
        for node in nodes(path)
        if isinstance(node, documented) and len((ast.get_docstring(node) or "").split()) > LONG_DOCSTRING
    ]


def number_of_parameters(module: str, name: str) -> int:
    """Parameters, without self, of ``function`` or ``Class.method``."""
    body: ast.AST = tree(modules()[module])
    for part in name.split("."):
        body = next(node for node in ast.iter_child_nodes(body) if getattr(node, "name", None) == part)
    assert isinstance(body, ast.FunctionDef)
    arguments = body.args
    listed = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
    return sum(argument is not None and argument.arg != "self" for argument in listed)


def public_names_defined_twice() -> dict[str, list[str]]:
    """Public functions and classes outside of the drop-in that several modules define, with these modules."""
    places: dict[str, list[str]] = defaultdict(list)
    for module, path in modules().items():
        if is_below(module, "drop_in"):
            continue
        for node in tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                places[node.name].append(module)
    return {name: where for name, where in places.items() if len(where) > 1}


def files_that_name(pattern: str, folder: str) -> list[str]:
    """Modules outside of ``folder`` of the package, and not of the drop-in, whose text matches ``pattern``."""
    return [
        module
        for module, path in modules().items()
        if not is_below(module, folder) and not is_below(module, "drop_in") and re.search(pattern, path.read_text())
    ]
