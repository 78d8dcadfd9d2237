"""Mutations of a function, made from its syntax tree: numbered, and the same in every run."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from tests.defects.patch import Replace, call_name, in_order

COMPARISONS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_PAIRS = (
    ("min", "max"),
    ("amin", "amax"),
    ("argmin", "argmax"),
    ("minimum", "maximum"),
    ("sum", "mean"),
    ("any", "all"),
    ("floor", "ceil"),
    ("sin", "cos"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("new_zeros", "new_ones"),
    ("add_", "sub_"),
    ("mul_", "div_"),
    ("exp", "expm1"),
    ("log", "log1p"),
    ("sigmoid", "tanh"),
    ("cumsum", "cumprod"),
)
NAMES = {first: second for first, second in _PAIRS} | {second: first for first, second in _PAIRS}
"""Functions and methods, with the ones that replace them."""
DROPPED = {
    *("detach", "sqrt", "rsqrt", "exp", "log", "neg", "abs", "square", "reciprocal", "clamp", "sigmoid", "softmax"),
    *("clone", "flip", "roll", "transpose", "flatten", "double", "float", "masked_fill", "index_select", "cumsum"),
}
"""Methods that a mutation omits."""
GROUPS = {
    "tp": "dp",
    "dp": "tp",
    "cp": "dp",
    "pp": "tp",
    "ep": "tp",
    "etp": "tp",
    "edp": "dp",
    "dp-cp": "dp",
    "tp-cp": "tp",
    "tp-pp": "pp",
    "etp-ep": "ep",
    "tp-cp-dp": "dp-cp",
}
"""Axes and groups of ranks."""
SYMMETRIC = {"min", "max", "gcd", "lcm", "isinstance", "maximum", "minimum", "add", "mul", "eq"}
"""Functions whose first two arguments are equivalent, or of different types."""
NO_NUMBERS = {"device", "strict", "non_blocking", "stacklevel", "exist_ok", "timeout", "flush", "file", "pin_memory"}
"""Keyword arguments that change no number on a CPU."""
SILENT = {"warn", "info", "debug", "warning", "print", "log", "record_function", "cast", "append_event", "emit"}
"""Calls that compute nothing."""


@dataclass(frozen=True)
class Mutant:
    """One mutation of a function."""

    target: str
    """The function, ``module:Qualname`` inside the package."""
    number: int
    """Number within the function."""
    kind: str
    change: str
    """The changed part before and after, for readers."""
    lines: tuple[int, int]
    """First and last line of the statement."""
    build: Callable[[], ast.FunctionDef]
    """Returns the changed function."""

    @property
    def name(self) -> str:
        """Its title, which is also its key in lists of mutants."""
        return f"{self.target}#{self.number}"


Change = tuple[str, ast.AST, Callable[[ast.AST], ast.AST]]
"""Kind, node, and a function that returns the replacement of a copy of the node."""


def mutants_of(target: str, definition: ast.FunctionDef) -> list[Mutant]:
    """All mutants of a function, in the order of its source."""
    order = {node: index for index, node in enumerate(ast.walk(definition))}
    lines = _lines(definition)
    mutants = []
    for number, (kind, node, build) in enumerate(_changes(definition)):
        replacement = build(copy.deepcopy(node))
        change = f"{_short(ast.unparse(node))}  ->  {_short(ast.unparse(replacement))}"
        changed = partial(_with, definition, order[node], build)
        mutants.append(Mutant(target, number, kind, change, lines[node], changed))
    return mutants


def _with(definition: ast.FunctionDef, position: int, build: Callable[[ast.AST], ast.AST]) -> ast.FunctionDef:
    """A copy of a function with the changed node ``position``, in the order of ``ast.walk``."""
    changed = copy.deepcopy(definition)
    original = next(node for index, node in enumerate(ast.walk(changed)) if index == position)
    replacement = ast.copy_location(build(copy.deepcopy(original)), original)
    Replace(original, replacement).visit(changed)
    return changed


def _short(text: str) -> str:
    """A text on one line of at most 100 characters."""
    line = " ".join(text.split())
    return line if len(line) <= 100 else f"{line[:97]}..."


def _lines(definition: ast.FunctionDef) -> dict[ast.AST, tuple[int, int]]:
    """The lines of the innermost statement of each node; of a compound statement, those of its head."""
    lines: dict[ast.AST, tuple[int, int]] = {}
    for statement in ast.walk(definition):
        if not isinstance(statement, ast.stmt):
            continue
        body = getattr(statement, "body", None)
        last = statement.end_lineno if not isinstance(body, list) else max(statement.lineno, body[0].lineno - 1)
        for node in ast.walk(statement):
            lines[node] = (statement.lineno, last)  # inner statements are visited later
    return lines


def _changes(definition: ast.FunctionDef) -> Iterator[Change]:
    """The changes of the nodes that compute, in the order of the source."""
    skipped = set(_without_numbers(definition))
    for node in in_order(definition):
        if node not in skipped:
            for rule in RULES:
                yield from rule(node)
    if definition.name == "forward" and definition.returns is not None and ast.unparse(definition.returns) == "Tensor":
        for node in in_order(definition):
            if isinstance(node, ast.Return) and node.value is not None and node not in skipped:
                yield "detach", node.value, lambda value: _call(ast.Attribute(value, "detach", ast.Load()))


def _without_numbers(definition: ast.FunctionDef) -> Iterator[ast.AST]:
    """Nodes of annotations, defaults, decorators, messages, errors and their conditions, and the docstring."""
    for node in ast.walk(definition):
        parts: list[ast.AST | None] = []
        if isinstance(node, ast.FunctionDef):
            parts = [node.args, node.returns, *node.decorator_list]
            if ast.get_docstring(node) is not None:
                parts.append(node.body[0])
        elif isinstance(node, ast.AnnAssign):
            parts = [node.annotation]
        elif isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr):
            parts = [node]
        elif isinstance(node, ast.If) and isinstance(node.body[0], ast.Raise) and not node.orelse:
            parts = [node.test]
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and call_name(node.value) in SILENT:
            parts = [node]
        elif isinstance(node, ast.Subscript) and ast.unparse(node.value) in ("list", "dict", "tuple", "cast"):
            parts = [node.slice]
        elif isinstance(node, ast.Call) and call_name(node) == "cast":
            parts = [node.args[0]]
        for part in parts:
            if part is not None:
                yield from ast.walk(part)


def _call(function: ast.expr, *arguments: ast.expr) -> ast.Call:
    return ast.Call(function, list(arguments), [])


def _plus(value: ast.expr, number: int) -> ast.BinOp:
    return ast.BinOp(value, ast.Add() if number > 0 else ast.Sub(), ast.Constant(abs(number)))


def _set(**fields: object) -> Callable[[ast.AST], ast.AST]:
    """Set fields of a node."""

    def build(node: ast.AST) -> ast.AST:
        for name, value in fields.items():
            setattr(node, name, value)
        return node

    return build


def _operators(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for index, operator in enumerate(node.ops):
            operators = [*node.ops]
            operators[index] = COMPARISONS[type(operator)]()
            yield "comparison", node, _set(ops=operators)
    elif isinstance(node, ast.BinOp | ast.AugAssign) and type(node.op) in ARITHMETIC:
        yield "arithmetic", node, _set(op=ARITHMETIC[type(node.op)]())
    elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
        yield "swapped arguments", node, _set(left=node.right, right=node.left)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield "arithmetic", node, lambda minus: minus.operand
    elif isinstance(node, ast.BoolOp):
        yield "condition", node, _set(op=ast.Or() if isinstance(node.op, ast.And) else ast.And())


def _conditions(node: ast.AST) -> Iterator[Change]:
    """A negated condition; comparisons for equality are negated by their operators."""
    if not isinstance(node, ast.If | ast.IfExp | ast.While):
        return
    test = node.test
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield "condition", test, lambda negated: negated.operand
    elif not (isinstance(test, ast.Compare) and not isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)):
        yield "condition", test, lambda condition: ast.UnaryOp(ast.Not(), condition)


def _constants(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    value = node.value
    if isinstance(value, bool):
        yield "constant", node, _set(value=not value)
    elif isinstance(value, int):
        yield "constant", node, _set(value=value + 1)
        if value == 1:
            yield "constant", node, _set(value=0)
    elif isinstance(value, float):
        yield "constant", node, _set(value=2.0 * value if value else 1.0)
    elif value in GROUPS:
        yield "group", node, _set(value=GROUPS[value])


def _bounds(node: ast.AST) -> Iterator[Change]:
    """Bounds of slices, ends of ranges, and loops that omit their first value."""
    if isinstance(node, ast.Slice):
        for name in ("lower", "upper"):
            bound = getattr(node, name)
            if bound is not None and not isinstance(bound, ast.Constant):
                yield "off by one", node, lambda part, name=name: _set(**{name: _plus(getattr(part, name), 1)})(part)
    elif isinstance(node, ast.Call) and call_name(node) == "range" and not isinstance(node.args[-1], ast.Starred):
        yield "off by one", node, lambda call: _set(args=[*call.args[:-1], _plus(call.args[-1], -1)])(call)
    elif isinstance(node, ast.For):
        values = lambda loop: _call(ast.Name("list", ast.Load()), loop.iter)  # noqa: E731
        rest = ast.Slice(ast.Constant(1))
        yield "off by one", node, lambda loop: _set(iter=ast.Subscript(values(loop), rest, ast.Load()))(loop)


def _calls(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    name = call_name(node)
    first = node.args[:2]
    plain = not any(isinstance(argument, ast.Starred) for argument in first)
    if len(first) == 2 and plain and name not in SYMMETRIC and ast.dump(first[0]) != ast.dump(first[1]):
        yield "swapped arguments", node, lambda call: _set(args=[call.args[1], call.args[0], *call.args[2:]])(call)
    for index, keyword in enumerate(node.keywords):
        if keyword.arg is not None and keyword.arg not in NO_NUMBERS:
            keywords = [*node.keywords[:index], *node.keywords[index + 1 :]]
            yield "dropped argument", node, _set(keywords=copy.deepcopy(keywords))
    if name in NAMES and not (name == "sum" and isinstance(node.func, ast.Name)):
        key = "attr" if isinstance(node.func, ast.Attribute) else "id"
        yield "other function", node.func, _set(**{key: NAMES[name]})
    if isinstance(node.func, ast.Attribute) and name in DROPPED:
        yield "missing call", node, lambda call: call.func.value
    elif len(first) == 2 and plain and "group" in ast.unparse(first[1]):
        yield "missing call", node, lambda call: call.args[0]


def _statements(node: ast.AST) -> Iterator[Change]:
    """Missing statements: calls, updates, and assignments to parts of objects."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_part = isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute)
    if is_call or is_part or isinstance(node, ast.AugAssign):
        yield "missing statement", node, lambda statement: ast.Pass()


RULES = (_operators, _conditions, _constants, _bounds, _calls, _statements)
