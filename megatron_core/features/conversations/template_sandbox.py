"""A program that compiles and renders chat templates in Jinja's sandbox, with limits of memory and processor time.

``template_process`` starts it with Python's isolated mode, as a file: it imports nothing of this package. Requests and
replies are JSON texts.
"""

import json
import math
import re
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import TemplateError
from jinja2.compiler import CodeGenerator, Frame
from jinja2.environment import Template
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Concat, Const, Getattr, Node, Output, TemplateData
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

LONGEST_TEXT = 2**24
"""Upper bound on the characters of a text and the elements of a list in a template."""
MOST_MEMORY = 2**30
"""Address space of the process in bytes; a text of LONGEST_TEXT characters, its parts and its JSON take 0.4 GiB."""
BEGIN = "\ufdd0"
END = "\ufdd1"
"""Marks around answers in rendered text: characters that Unicode reserves for internal use."""
LONGEST_MESSAGE = 2000
MOST_TEMPLATES = 16
"""Compiled templates that the process keeps."""


class Refusal(Exception):
    """A template that cannot be read, or cannot be rendered with these messages."""


class AnswerMarks(Extension):
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
        for operand in node.nodes:
            self.visit(operand, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates; OverflowError for values that are too large.

    ``date`` (YYYY-MM-DD): the result of ``strftime_now``, by default the time of the call.
    """

    intercepted_binops = frozenset({"+", "*", "**"})
    code_generator_class = _Generator

    marks_answers = False
    """Whether a parsed template has the tag ``generation``."""

    def __init__(self, date: str | None) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, AnswerMarks])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: (datetime.fromisoformat(date) if date else datetime.now()).strftime(
            form
        )

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

    def join(self, values: Sequence[Any]) -> str:
        """``a ~ b``."""
        texts = [str(value) for value in values]
        _check(sum(map(len, texts)))
        return "".join(texts)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, list, tuple)) else 0


def _check(size: int) -> None:
    if size > LONGEST_TEXT:
        raise OverflowError(f"a value has more than {LONGEST_TEXT} characters, elements or bits")


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, with the options of `transformers`; Jinja's filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@dataclass(frozen=True)
class Compiled:
    """The templates for conversations without and with tools, and the names in them."""

    plain: Template
    tool_use: Template
    facts: Mapping[str, Any]


def compile_templates(source: str, tool_use: str | None, date: str | None) -> Compiled:
    """Compile the template for conversations without tools and that with tools, by default the same one."""
    environment = Sandbox(date)
    sources = [source] if tool_use is None else [source, tool_use]
    variables = set[str]()
    names = set[str]()
    try:
        trees = [environment.parse(text) for text in sources]
        for tree in trees:
            variables |= find_undeclared_variables(tree)
            names |= {node.attr for node in tree.find_all(Getattr)}
            names |= {node.value for node in tree.find_all(Const) if isinstance(node.value, str)}
        templates = [environment.from_string(tree) for tree in trees]
    except (TemplateError, ArithmeticError, ValueError, RecursionError, MemoryError) as error:
        raise Refusal(f"the chat template cannot be read: {_message(error)}") from None
    facts = {"marks_answers": environment.marks_answers, "variables": sorted(variables), "names": sorted(names)}
    return Compiled(templates[0], templates[-1], facts)


def render(compiled: Compiled, order: Mapping[str, Any]) -> dict[str, Any]:
    """Render the whole conversation, and its beginnings.

    A beginning is the pair (number of messages, add_generation_prompt); its result is the pair (length of its text,
    number of first characters that it has in common with the text of the whole conversation).
    """
    template = compiled.plain if order["tools"] is None else compiled.tool_use
    messages = order["messages"]

    def text_of(count: int, add_generation_prompt: bool) -> str:
        values = {**order["variables"], "messages": messages[:count], "tools": order["tools"], "documents": None}
        return _generated(template, {**values, "add_generation_prompt": add_generation_prompt})

    text, marks = _without_marks(text_of(len(messages), order["add_generation_prompt"]), compiled)
    beginnings = []
    for count, add_generation_prompt in order["beginnings"]:
        beginning, _ = _without_marks(text_of(count, add_generation_prompt), compiled)
        beginnings.append((len(beginning), _common_length(text, beginning)))
    return {"text": text, "marks": marks, "beginnings": beginnings}


def _common_length(text: str, beginning: str) -> int:
    """The number of first characters that two texts have in common."""
    if text.startswith(beginning):
        return len(beginning)
    pairs = enumerate(zip(text, beginning, strict=False))
    return next((index for index, (one, other) in pairs if one != other), len(text))


def _generated(template: Template, values: Mapping[str, Any]) -> str:
    written = 0
    pieces = []
    try:
        for piece in template.generate(values):
            written += len(piece)
            if written > LONGEST_TEXT:
                raise Refusal(f"the chat template writes more than {LONGEST_TEXT} characters; correct it")
            pieces.append(piece)
    except Refusal:
        raise
    except (TemplateError, TypeError, ValueError) as error:
        raise Refusal(f"the chat template refuses these messages: {_message(error)}") from None
    except Exception as error:  # expressions of the template raise any kind: recursion, overflow, missing keys
        name = type(error).__name__
        raise Refusal(
            f"the chat template fails with {name}{': ' * bool(str(error))}{_message(error)}; correct it"
        ) from None
    return "".join(pieces)


def _without_marks(text: str, compiled: Compiled) -> tuple[str, list[tuple[int, int]]]:
    """The text without marks, and the characters [begin, end) between them."""
    if not compiled.facts["marks_answers"]:
        return text, []
    pieces = re.split(f"([{BEGIN}{END}])", text)
    delimiters = [piece for piece in pieces if piece in (BEGIN, END)]
    if delimiters != [BEGIN, END] * (len(delimiters) // 2):
        raise Refusal("a message contains U+FDD0 or U+FDD1, which Unicode reserves for internal use; remove it")
    length = 0
    places = []
    for piece in pieces:
        if piece in (BEGIN, END):
            places.append(length)
        else:
            length += len(piece)
    marks = list(zip(places[::2], places[1::2], strict=True))
    return "".join(piece for piece in pieces if piece not in (BEGIN, END)), marks


def _message(error: BaseException) -> str:
    """The message of an error of a template, which may have any length."""
    return str(error)[:LONGEST_MESSAGE]


def answer(request: Mapping[str, Any], templates: dict[str, Compiled]) -> dict[str, Any]:
    """The reply to a request; without the compiled template and its source it is ``{"unknown": true}``."""
    key = request["template"]
    if request["sources"] is not None:
        while len(templates) >= MOST_TEMPLATES:
            del templates[next(iter(templates))]
        templates[key] = compile_templates(*request["sources"])
    compiled = templates.get(key)
    if compiled is None:
        return {"unknown": True}
    return dict(compiled.facts) if request["render"] is None else render(compiled, request["render"])


def serve_templates(connection: Connection) -> None:
    """Answer requests until the other end is closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    templates: dict[str, Compiled] = {}
    connection.send_bytes(b"ready")
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # The parent ends this process after the same time on the clock; this limit holds if the parent has died.
        seconds = math.ceil(time.process_time() + request["seconds"]) + 1
        resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.RLIM_INFINITY))
        try:
            reply = answer(request, templates)
            data = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
        except Refusal as refusal:
            data = json.dumps({"refusal": str(refusal)}).encode()
        except MemoryError:
            data = json.dumps({"refusal": "the chat template fails with MemoryError; correct it"}).encode()
        connection.send_bytes(data)


if __name__ == "__main__":
    serve_templates(Connection(int(sys.argv[2])))
