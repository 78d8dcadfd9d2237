"""Changes of a function's syntax tree, which do not depend on the layout of its source.

A patch finds one part of a function: a call, an argument, a constant, an attribute, the value of a ``return`` or of an
assignment, an expression, a statement. It replaces this part by another one. In the new expression ``OLD`` stands for
the replaced part; of a call, ``SELF`` stands for the object of the method, and ``FIRST``, ``SECOND``, ``THIRD`` for its
positional arguments. Hence a patch needs the names of local variables only where its defect is about them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

PARTS = ("FIRST", "SECOND", "THIRD")


class Replace(ast.NodeTransformer):
    """Replaces one node of a tree."""

    def __init__(self, old: ast.AST, new: ast.AST | list[ast.stmt]) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        """The new node, or nodes, in place of the old one."""
        return self.new if node is self.old else self.generic_visit(node)


class _Fill(ast.NodeTransformer):
    """Puts parts of the replaced node into a new expression."""

    def __init__(self, parts: dict[str, ast.expr]) -> None:
        self.parts = parts

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A part in place of its name."""
        return copy.deepcopy(self.parts[node.id]) if node.id in self.parts else node


@dataclass(frozen=True)
class Patch:
    """Replaces one part of a function by ``new``; None omits it."""

    part: str
    """The name of the constructor below."""
    where: tuple[str | int, ...]
    new: str | None
    number: int = 0
    """Which of several such parts, from 1 on; 0: there must be exactly one."""

    def __call__(self, definition: ast.FunctionDef) -> ast.FunctionDef:
        """A changed copy of a function."""
        changed = copy.deepcopy(definition)
        nodes = list(self._nodes(changed))
        count = len(nodes)
        which = "once" if self.number == 0 else f"{self.number} times"
        assert count == 1 if self.number == 0 else count >= self.number, (
            f"{definition.name} has {self.part} {self.where} {count} times, not {which}"
        )
        node = nodes[max(self.number, 1) - 1]
        if isinstance(node, ast.keyword) and self.new is None:
            for call in ast.walk(changed):
                if isinstance(call, ast.Call) and node in call.keywords:
                    call.keywords.remove(node)
            return changed
        old = node.value if isinstance(node, ast.keyword) else node
        Replace(old, self._replacement(old)).visit(changed)
        return changed

    def _nodes(self, definition: ast.FunctionDef) -> Iterator[ast.AST]:
        """The parts of a function that the patch means, in the order of the source."""
        for node in in_order(definition):
            yield from FINDERS[self.part](node, *self.where)

    def _replacement(self, old: ast.AST) -> ast.AST | list[ast.stmt]:
        if self.new is None:
            return ast.copy_location(ast.Pass(), old)
        if isinstance(old, ast.stmt):
            statements = ast.parse(self.new).body
            for node in [node for statement in statements for node in ast.walk(statement)]:
                ast.copy_location(node, old)
            return statements
        parts = parts_of(old)
        new = _Fill(parts).visit(ast.parse(self.new, mode="eval").body)
        for node in ast.walk(new):
            ast.copy_location(node, old)
        return new


def in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes in the order of the source."""
    yield node
    for child in ast.iter_child_nodes(node):
        yield from in_order(child)


def parts_of(node: ast.AST) -> dict[str, ast.expr]:
    """The parts of a node that a new expression can name."""
    if not isinstance(node, ast.expr):
        return {}
    parts = {"OLD": node}
    if isinstance(node, ast.Call):
        parts |= dict(zip(PARTS, node.args, strict=False))
        if isinstance(node.func, ast.Attribute):
            parts["SELF"] = node.func.value
    return parts


def call_name(call: ast.Call) -> str:
    """The last part of the name of the called function."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _call(node: ast.AST, name: str) -> Iterator[ast.AST]:
    if isinstance(node, ast.Call) and call_name(node) == name:
        yield node


def _call_statement(node: ast.AST, name: str) -> Iterator[ast.AST]:
    if isinstance(node, ast.Expr | ast.AugAssign) and list(_call(node.value, name)):
        yield node


def _argument(node: ast.AST, name: str, key: str | int) -> Iterator[ast.AST]:
    """The argument of a position or of a keyword."""
    for call in _call(node, name):
        assert isinstance(call, ast.Call)
        if isinstance(key, int):
            yield from call.args[key : key + 1]
        else:
            yield from (keyword for keyword in call.keywords if keyword.arg == key)


def _constant(node: ast.AST, value: object) -> Iterator[ast.AST]:
    if isinstance(node, ast.Constant) and type(node.value) is type(value) and node.value == value:
        yield node


def _attribute(node: ast.AST, name: str) -> Iterator[ast.AST]:
    if isinstance(node, ast.Attribute) and node.attr == name:
        yield node


def _returned(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.Return) and node.value is not None:
        yield node.value


def _assigned(node: ast.AST, target: str) -> Iterator[ast.AST]:
    if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if ast.unparse(targets[0]) == target:
            yield node.value


def _condition(node: ast.AST) -> Iterator[ast.AST]:
    if isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test


def _expression(node: ast.AST, source: str) -> Iterator[ast.AST]:
    if isinstance(node, ast.expr) and ast.dump(node) == ast.dump(ast.parse(source, mode="eval").body):
        yield node


def _statement(node: ast.AST, source: str) -> Iterator[ast.AST]:
    if isinstance(node, ast.stmt) and ast.dump(node) == ast.dump(ast.parse(source).body[0]):
        yield node


FINDERS: dict[str, Callable[..., Iterator[ast.AST]]] = {
    "call": _call,
    "call statement": _call_statement,
    "argument": _argument,
    "constant": _constant,
    "attribute": _attribute,
    "returned": _returned,
    "assigned": _assigned,
    "condition": _condition,
    "expression": _expression,
    "statement": _statement,
}


def without_call(name: str, number: int = 0) -> Patch:
    """Omits the statement that only calls a function ``name``."""
    return Patch("call statement", (name,), None, number)


def call(name: str, new: str, number: int = 0) -> Patch:
    """Replaces a call of a function or method ``name``."""
    return Patch("call", (name,), new, number)


def argument(name: str, key: str | int, new: str, number: int = 0) -> Patch:
    """Replaces an argument, by keyword or position, of a call of ``name``."""
    return Patch("argument", (name, key), new, number)


def without_argument(name: str, key: str, number: int = 0) -> Patch:
    """Omits a keyword argument of a call of ``name``."""
    return Patch("argument", (name, key), None, number)


def constant(value: str | float, new: str, number: int = 0) -> Patch:
    """Replaces a constant."""
    return Patch("constant", (value,), new, number)


def attribute(name: str, new: str, number: int = 0) -> Patch:
    """Replaces an attribute ``name`` of any object."""
    return Patch("attribute", (name,), new, number)


def returned(new: str, number: int = 0) -> Patch:
    """Replaces the value of a ``return``."""
    return Patch("returned", (), new, number)


def assigned(target: str, new: str, number: int = 0) -> Patch:
    """Replaces the value of an assignment to ``target``."""
    return Patch("assigned", (target,), new, number)


def condition(new: str, number: int = 0) -> Patch:
    """Replaces the condition of an ``if`` or ``while``."""
    return Patch("condition", (), new, number)


def expression(old: str, new: str, number: int = 0) -> Patch:
    """Replaces an expression, in whatever layout of the source."""
    return Patch("expression", (old,), new, number)


def statement(old: str, new: str, number: int = 0) -> Patch:
    """Replaces a statement by one or more."""
    return Patch("statement", (old,), new, number)


def without_statement(old: str, number: int = 0) -> Patch:
    """Omits a statement."""
    return Patch("statement", (old,), None, number)


@dataclass(frozen=True)
class Text:
    """Replaces a fragment of the source, for changes of several statements. Indentation is relative to the ``def``."""

    old: str
    new: str

    def changed(self, source: str, name: str) -> str:
        """The changed source of the function ``name``."""
        times = source.count(self.old)
        assert times == 1, f"{name} has {times} times, not once: {self.old}"
        return source.replace(self.old, self.new)


def text(old: str, new: str) -> Text:
    """Replaces ``old``, which the source must contain once."""
    return Text(old, new)
