"""Chat templates: messages to the text of a prompt, as in `transformers`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError, DataError, quoted
from megatron_core.features.conversations.template_process import PROCESS
from megatron_core.text_file import read_text
from megatron_core.tokenizers.base import Tokenizer
from megatron_core.tokenizers.companions import TEMPLATE_FILE, TEMPLATE_FOLDER, template_path
from megatron_core.vocabularies.hugging_face import named_tokens, read_tokenizer_object

CONFIG_FILE = "tokenizer_config.json"
DEFAULT = "default"
TOOL_USE = "tool_use"
"""Names of the templates for conversations without and with tools."""
COMPILE_SECONDS = 10.0
"""Time limit for reading a template."""
RENDER_SECONDS = 60.0
"""Time limit for rendering a conversation."""
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Keys of a message with the reasoning before its content, the first that is given."""
Span = tuple[int, int]


@dataclass(frozen=True)
class Rendered:
    """The text of a conversation, and the characters of its parts."""

    text: str
    marks: list[Span]
    """Answers that the template marks with ``{% generation %}``."""
    beginnings: list[Span]
    """Of each beginning that was asked for: the length of its text, and the number of first characters that it has in
    common with ``text``."""


class ChatTemplate:
    """A Jinja template; ``tokens`` maps names of special tokens to their texts.

    ``tool_use`` is the template for conversations with tools, by default ``source``. ``special_as_text``: special
    tokens that the tokenizer encodes as ordinary text, so that the template must not write them. ``date``
    (YYYY-MM-DD): the result of ``strftime_now`` in the template, by default the time of the call. Templates are
    compiled and rendered in a process with limits of time and memory (``template_process``), in Jinja's sandbox.
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
        self._sources = source, tool_use, date
        self._key = sha256(json.dumps(self._sources).encode()).hexdigest()
        self._tokens = dict(tokens)
        written = "\n".join([source, tool_use or "", *self._tokens.values()])
        self.reads_date = "strftime_now" in written
        self._refused = [token for token in special_as_text if token in written]
        try:
            facts = self._request(None, COMPILE_SECONDS)
        except TimeoutError:
            raise ConfigError(f"the chat template cannot be read within {COMPILE_SECONDS:g} s; correct it") from None
        except DataError as error:
            raise ConfigError(str(error)) from None
        self.marks_answers: bool = facts["marks_answers"]
        self.variables = frozenset(facts["variables"])
        """Variables that the template reads."""
        self.names = frozenset(facts["names"])
        """Names of attributes, and texts, in the template."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        add_generation_prompt: bool = True,
        seconds: float = RENDER_SECONDS,
    ) -> str:
        """The text of ``messages`` (role and content), by default up to the beginning of the assistant's answer.

        ``tools`` are the functions that a model may call, in the form that the template expects.
        Errors: ``DataError`` if the template refuses the messages or fails, writes more than 2^24 characters, or does
        not end within ``seconds``.
        """
        return self._render(messages, tools, {}, (), add_generation_prompt, seconds).text

    def render_answers(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Any = None,
        variables: Mapping[str, Any] | None = None,
        beginnings: Sequence[tuple[int, bool]] = (),
    ) -> Rendered:
        """The text of a whole conversation, the answers that the template marks, and its ``beginnings``: pairs of a
        number of messages and ``add_generation_prompt``. ``variables`` are further variables of the template."""
        return self._render(messages, tools, variables or {}, beginnings, False, RENDER_SECONDS)

    def _render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Any,
        variables: Mapping[str, Any],
        beginnings: Sequence[tuple[int, bool]],
        add_generation_prompt: bool,
        seconds: float,
    ) -> Rendered:
        messages = list(map(_with_reasoning, messages))
        values = {
            "messages": messages,
            "tools": tools,
            "variables": {**self._tokens, **variables},
            "beginnings": beginnings,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            reply = self._request(values, seconds)
        except TimeoutError:
            raise DataError(f"the chat template did not end within {seconds:g} seconds; correct it") from None
        pairs = {name: [(first, second) for first, second in reply[name]] for name in ("marks", "beginnings")}
        text = reply["text"]
        source = json.dumps([messages, tools], ensure_ascii=False, default=str) if self._refused else ""
        for token in self._refused:
            if text.count(token) > source.count(token):
                raise DataError(
                    f"the chat template writes {token}, which this kind of tokenizer encodes as ordinary text; use "
                    "--tokenizer-type HuggingFaceTokenizer with the model's tokenizer.json, or another --chat-template"
                )
        return Rendered(text, **pairs)

    def _request(self, values: Mapping[str, Any] | None, seconds: float) -> dict[str, Any]:
        """Render the template; without ``values`` compile it."""
        return PROCESS.request({"template": self._key, "render": values}, self._sources, seconds)


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with its reasoning under the names that templates read, as in `transformers`."""
    reasoning = next((message[name] for name in REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def chat_template_of(tokenizer: Tokenizer, file: str | None = None, *, date: str | None = None) -> ChatTemplate | None:
    """The template in ``file``, or the one next to the tokenizer's files; None without one.

    ``file`` may also be the name of a template in ``templates``.
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
        templates = {DEFAULT: _read(template_path(file))}
    if DEFAULT not in templates:
        return None
    as_text = getattr(tokenizer, "special_as_text", ())
    return ChatTemplate(
        templates[DEFAULT], tokens, tool_use=templates.get(TOOL_USE), special_as_text=as_text, date=date
    )


def _templates_in_files(folder: Path) -> dict[str, str]:
    """The templates in separate files, by name."""
    default = folder / TEMPLATE_FILE
    templates = {DEFAULT: _read(default)} if default.is_file() else {}
    further_files = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    return templates | {path.stem: _read(path) for path in further_files if path.is_file()}


def _templates_in_config(path: Path) -> dict[str, str]:
    """The templates in a tokenizer_config.json, by name: a text, or a list of objects with name and template."""
    templates = read_tokenizer_object(path).get("chat_template") if path.is_file() else None
    if templates is None or isinstance(templates, str):
        return {} if templates is None else {DEFAULT: templates}
    if isinstance(templates, list) and all(isinstance(entry, dict) for entry in templates):
        templates = {entry.get("name"): entry.get("template") for entry in templates}
    if not isinstance(templates, dict) or not all(isinstance(text, str) for pair in templates.items() for text in pair):
        raise ConfigError(
            f"{path}: chat_template is {quoted(templates)}, neither a string nor a list of objects with name and "
            "template; copy the file again, or give --chat-template FILE"
        )
    return templates


def _read(path: Path) -> str:
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template={str(path)!r} cannot be read: {error}") from None
