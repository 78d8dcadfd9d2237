"""Jinja's sandbox for chat templates, with bounds on the size of values and on time."""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Concat, Node, Output, TemplateData
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_TEXT = 2**24
"""Upper bound on the characters of a text and the elements of a list in a template."""
BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around answers in rendered text: characters that Unicode reserves for internal use."""


class Generation(Extension):
    """Write a mark before and after the text between the tags, which is an answer of the assistant."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[Node]:
        """Parse the statements between the tags and enclose them in marks."""
        next(parser.stream)
        self.environment.marks_answers = True  # type: ignore[attr-defined]
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return [Output([TemplateData(BEGIN)]), *body, Output([TemplateData(END)])]


class _Generator(CodeGenerator):
    """Compile ``a ~ b`` to a call of ``Sandbox.join``."""

    def visit_Concat(self, node: Concat, frame: Frame) -> None:
        self.write("environment.join((")
        for each in node.nodes:
            self.visit(each, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates; OverflowError for values that are too large."""

    intercepted_binops = frozenset({"+", "*", "**"})
    code_generator_class = _Generator

    marks_answers = False
    """Whether a parsed template has the tag ``generation``."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """``left operator right``; the size of the result is checked before it is computed."""
        if operator == "+":
            _check(_length(left) + _length(right))
        elif operator == "*":
            for sequence, number in ((left, right), (right, left)):
                if isinstance(number, int):
                    _check(_length(sequence) * number)
        elif isinstance(left, int) and isinstance(right, int):
            _check(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)

    def join(self, parts: Sequence[Any]) -> str:
        """``a ~ b``."""
        texts = [str(part) for part in parts]
        _check(sum(map(len, texts)))
        return "".join(texts)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _check(size: int) -> None:
    if size > LONGEST_TEXT:
        raise OverflowError(f"a value has more than {LONGEST_TEXT} characters, elements or bits")


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Raise ``TimeoutError`` at the first line of Python code that this thread runs after ``seconds``."""
    if seconds is None:
        yield
        return
    end, before = time.monotonic() + seconds, sys.gettrace()

    def check(*_: object) -> Any:
        if time.monotonic() > end:
            raise TimeoutError
        return check

    sys.settrace(check)
    try:
        yield
    finally:
        sys.settrace(before)
