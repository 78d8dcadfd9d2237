"""Schemas of instruction data: OpenAI's ``messages``, ShareGPT's turns, the columns of Alpaca and Dolly."""

from collections.abc import Collection, Mapping
from typing import Any

from megatron_core.errors import DataError

Message = dict[str, Any]
QUESTIONS = ("instruction", "prompt", "query", "question")
CONTEXTS = ("input", "context")
ANSWERS = ("output", "response", "answer", "completion")
ROLES = {
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "function"), "tool"),
    "system": "system",
}
"""Roles of ShareGPT's speakers; any other speaker is the user."""


def schema_of(columns: Collection[str]) -> str:
    """openai-messages, sharegpt, alpaca or pretrain-text: the first whose columns exist; DataError for none."""
    if "messages" in columns:
        return "openai-messages"
    if "conversations" in columns:
        return "sharegpt"
    if any(name in columns for name in QUESTIONS) and any(name in columns for name in ANSWERS):
        return "alpaca"
    if "text" in columns:
        return "pretrain-text"
    raise DataError(
        f"cannot infer the schema of the columns {', '.join(columns)}; legal: messages, conversations, a question "
        f"({', '.join(QUESTIONS)}) with an answer ({', '.join(ANSWERS)}), or text"
    )


def messages_of(line: Mapping[str, Any]) -> list[Message]:
    """The messages of a line. Errors: DataError."""
    schema = schema_of(line)
    if schema == "openai-messages":
        return [_openai(message) for message in _objects(line, "messages")]
    if schema == "sharegpt":
        return sharegpt(line)
    if schema == "alpaca":
        return alpaca(line)
    raise DataError("a line of text has no answers; give lines with messages, conversations or questions and answers")


def alpaca(line: Mapping[str, Any]) -> list[Message]:
    """The question, with its context after an empty line if there is one, and the answer."""
    question, context, answer = (_first(line, names) for names in (QUESTIONS, CONTEXTS, ANSWERS))
    asked = f"{question}\n\n{context}" if context else question
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def sharegpt(line: Mapping[str, Any]) -> list[Message]:
    """Turns with ``from``, the speaker, and ``value``, the text."""
    turns = _objects(line, "conversations")
    return [
        {"role": ROLES.get(text(turn.get("from"), "from"), "user"), "content": text(turn.get("value"), "value")}
        for turn in turns
    ]


def _openai(message: Mapping[str, Any]) -> Message:
    """Text parts are joined; a tool call may have no content. Keys with null are removed, as in transformers."""
    content, role = message.get("content"), text(message.get("role"), "role")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        content = "".join(part["text"] for part in content)
    if content is not None or not message.get("tool_calls"):
        content = text(content, "content")
    found = {**message, "role": role, "content": content}
    return {key: value for key, value in found.items() if value is not None}


def _objects(line: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    found = line[name]
    if not isinstance(found, list) or not all(isinstance(each, Mapping) for each in found):
        raise DataError(f"{name} must be a list of objects")
    return found


def text(value: Any, name: str) -> str:
    """``value``; DataError unless it is a string."""
    if not isinstance(value, str):
        kind = "null or missing" if value is None else f"of type {type(value).__name__}"
        raise DataError(f"{name} must be a string, not {kind}: only text is supported")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise DataError(f"{name} has half of a surrogate pair, which is not valid Unicode") from None
    return value


def _first(line: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((text(line[name], name) for name in names if line.get(name) is not None), "")
