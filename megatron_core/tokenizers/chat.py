"""Chat templates: from messages to the text of a prompt, as `transformers` writes it."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError, DataError
from megatron_core.text_file import read_text
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.tokenizers.hugging_face import read_object

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"


class ChatTemplate:
    """A template in Jinja's language, run in its sandbox; ``tokens`` are names and texts of special tokens.

    Needs jinja2, which torch brings.
    Errors: ``ConfigError`` for a template that cannot be read.
    """

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.nodes import Node
        from jinja2.parser import Parser
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        class Generation(Extension):
            """Leaves out the marks around answers, as transformers does where it only renders."""

            tags = {"generation"}  # noqa: RUF012

            def parse(self, parser: Parser) -> list[Node]:
                next(parser.stream)
                return parser.parse_statements(("name:endgeneration",), drop_needle=True)

        self._error = jinja2.TemplateError
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {
            "raise_exception": self._raise,
            "strftime_now": lambda form: datetime.now().strftime(form),
        }
        self._tokens = dict(tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template cannot be read: {error}") from None

    def render(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True
    ) -> str:
        """The text of ``messages`` (role and content), by default up to where the assistant's answer begins.

        ``tools`` are the functions that a model may call, as the template expects them.

        ``DataError`` if the template refuses them.
        """
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                documents=None,
                **self._tokens,
            )
        except (self._error, TypeError, ValueError) as error:
            raise DataError(f"the chat template refuses these messages: {error}") from None

    def _raise(self, message: str) -> None:
        raise self._error(message)


def chat_template_of(tokenizer: Tokenizer, file: str | None = None) -> ChatTemplate | None:
    """The template in ``file``, or the one beside the tokenizer's files; None without one."""
    folders = {path.parent for path in tokenizer.files()}
    tokens: dict[str, str] = {}
    source = None
    for config in (folder / CONFIG_FILE for folder in sorted(folders)):
        content = read_object(config) if config.is_file() else {}
        named = {key: value.get("content") if isinstance(value, dict) else value for key, value in content.items()}
        tokens |= {key: value for key, value in named.items() if key.endswith("_token") and isinstance(value, str)}
        found = content.get("chat_template")
        if isinstance(found, list):  # several by name
            found = next((each["template"] for each in found if each.get("name") == "default"), None)
        source = found if isinstance(found, str) else source
    for path in [folder / TEMPLATE_FILE for folder in sorted(folders)] if file is None else [Path(file)]:
        if file is not None or path.is_file():
            try:
                source = read_text(path)
            except (OSError, ValueError) as error:
                raise ConfigError(f"chat_template={str(path)!r} cannot be read: {error}") from None
    return None if source is None else ChatTemplate(source, tokens)


def _to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    """Plain JSON: Jinja's own escapes characters of HTML."""
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
