"""Chat templates: messages to the text of a prompt, as in `transformers`."""

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError, DataError, quoted
from megatron_core.text_file import read_text
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.tokenizers.companions import TEMPLATE_FILE, TEMPLATE_FOLDER
from megatron_core.tokenizers.hugging_face import named_tokens, read_object

CONFIG_FILE = "tokenizer_config.json"
DEFAULT, TOOL_USE = "default", "tool_use"
"""Names of the templates for conversations without and with tools."""


class ChatTemplate:
    """A Jinja template that runs in Jinja's sandbox; ``tokens`` maps names of special tokens to their texts.

    ``tool_use`` is the template for conversations with tools, by default ``source``. ``special_as_text``: special
    tokens that the tokenizer encodes as ordinary text, so that the template must not write them. ``date``
    (YYYY-MM-DD): the result of ``strftime_now`` in the template, by default the time of the call. Needs jinja2.
    Errors: ``ConfigError`` for a template that cannot be read.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        *,
        tool_use: str | None = None,
        special_as_text: Sequence[str] = (),
        date: str | None = None,
    ) -> None:
        import jinja2

        from megatron_core.tokenizers import template_sandbox

        self._error = jinja2.TemplateError
        self._sandbox = template_sandbox
        environment = template_sandbox.Sandbox()
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": self._raise,
            "strftime_now": lambda form: (datetime.fromisoformat(date) if date else datetime.now()).strftime(form),
        }
        self._tokens = dict(tokens)
        written = "\n".join([source, tool_use or "", *self._tokens.values()])
        self.reads_date = "strftime_now" in written
        self._refused = [token for token in special_as_text if token in written]
        try:
            self._template = environment.from_string(source)
            self._tool_use = self._template if tool_use is None else environment.from_string(tool_use)
        except (jinja2.TemplateError, ArithmeticError, RecursionError, MemoryError) as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from None
        self.marks_answers = environment.marks_answers

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        seconds: float | None = None,
    ) -> str:
        """The text of ``messages`` (role and content), by default up to the beginning of the assistant's answer.

        ``tools`` are the functions that a model may call, in the form that the template expects.
        Errors: ``DataError`` if the template refuses the messages or fails, writes more than 2^24 characters, or does
        not end within ``seconds``.
        """
        text = self._render(messages, tools, add_generation_prompt, seconds)
        begin, end = self._sandbox.BEGIN, self._sandbox.END
        return text.replace(begin, "").replace(end, "") if self.marks_answers else text

    def render_answers(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None
    ) -> tuple[str, list[tuple[int, int]]]:
        """The text of whole conversations, and the characters [begin, end) of the answers that the template marks with
        ``{% generation %}``."""
        begin, end = self._sandbox.BEGIN, self._sandbox.END
        parts = re.split(f"([{begin}{end}])", self._render(messages, tools, False))
        text, marks = "", list[int]()
        found = [part for part in parts if part in (begin, end)]
        if found != [begin, end] * (len(found) // 2):
            raise DataError("a message contains U+FDD0 or U+FDD1, which Unicode reserves for internal use; remove it")
        for part in parts:
            if part in (begin, end):
                marks.append(len(text))
            else:
                text += part
        return text, list(zip(marks[::2], marks[1::2], strict=True))

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        add_generation_prompt: bool,
        seconds: float | None = None,
    ) -> str:
        template = self._template if tools is None else self._tool_use
        written, parts, most = 0, [], self._sandbox.LONGEST_TEXT
        try:
            with self._sandbox.time_limit(seconds):
                for part in template.generate(
                    messages=messages,
                    add_generation_prompt=add_generation_prompt,
                    tools=tools,
                    documents=None,
                    **self._tokens,
                ):
                    written += len(part)
                    if written > most:
                        raise DataError(f"the chat template writes more than {most} characters; correct it")
                    parts.append(part)
        except DataError:
            raise
        except TimeoutError:
            raise DataError(f"the chat template did not end within {seconds:g} seconds; correct it") from None
        except (self._error, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses these messages: {error}") from None
        except Exception as error:  # expressions of the template raise any kind: recursion, overflow, missing keys
            raise DataError(f"the chat template fails with {type(error).__name__}: {error}; correct it") from None
        text = "".join(parts)
        given = json.dumps([messages, tools], ensure_ascii=False, default=str) if self._refused else ""
        for token in self._refused:
            if text.count(token) > given.count(token):
                raise DataError(
                    f"the chat template writes {token}, which this kind of tokenizer encodes as ordinary text; use "
                    "--tokenizer-type HuggingFaceTokenizer with the model's tokenizer.json, or another --chat-template"
                )
        return text

    def _raise(self, message: str) -> None:
        raise self._error(message)


def chat_template_of(tokenizer: Tokenizer, file: str | None = None, *, date: str | None = None) -> ChatTemplate | None:
    """The template in ``file``, or the one next to the tokenizer's files; None without one.

    As in `transformers`, files of templates replace all that tokenizer_config.json has. ``date``: see ``ChatTemplate``.
    Errors: ``ConfigError`` for a file that cannot be read.
    """
    folders = sorted({path.parent for path in tokenizer.files() if path.parent.name != TEMPLATE_FOLDER})
    tokens: dict[str, str] = {}
    templates: dict[str, str] = {}
    for folder in folders:
        tokens |= named_tokens(folder)
        templates = _templates_in_files(folder) or _templates_in_config(folder / CONFIG_FILE) or templates
    if file is not None:
        templates = {DEFAULT: _read(Path(file))}
    if DEFAULT not in templates:
        return None
    as_text = getattr(tokenizer, "special_as_text", ())
    return ChatTemplate(
        templates[DEFAULT], tokens, tool_use=templates.get(TOOL_USE), special_as_text=as_text, date=date
    )


def _templates_in_files(folder: Path) -> dict[str, str]:
    """The templates in separate files, by name."""
    default = folder / TEMPLATE_FILE
    found = {DEFAULT: _read(default)} if default.is_file() else {}
    others = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    return found | {path.stem: _read(path) for path in others if path.is_file()}


def _templates_in_config(path: Path) -> dict[str, str]:
    """The templates in a tokenizer_config.json, by name: a text, or a list of objects with name and template."""
    found = read_object(path).get("chat_template") if path.is_file() else None
    if found is None or isinstance(found, str):
        return {} if found is None else {DEFAULT: found}
    if isinstance(found, list) and all(isinstance(each, dict) for each in found):
        found = {each.get("name"): each.get("template") for each in found}
    if not isinstance(found, dict) or not all(isinstance(text, str) for pair in found.items() for text in pair):
        raise ConfigError(
            f"{path}: chat_template is {quoted(found)}, neither a string nor a list of objects with name and "
            "template; copy the file again, or give --chat-template FILE"
        )
    return found


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template={str(path)!r} cannot be read: {error}") from None


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON, with the options of `transformers`; Jinja's filter would escape HTML characters."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
