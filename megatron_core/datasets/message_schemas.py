"""Schemas of instruction data: OpenAI's ``messages``, ShareGPT's turns, the columns of Alpaca and Dolly, and trl's
``prompt`` and ``completion``, of which only the completion is learned."""

import json
from collections.abc import Collection, Mapping
from typing import Any

from megatron_core.errors import DataError, shortened

Message = dict[str, Any]
QUESTIONS = ("instruction", "prompt", "query", "question")
CONTEXTS = ("input", "context")
ANSWERS = ("output", "response", "answer", "completion")
ROLES = {
    **dict.fromkeys(("gpt", "assistant", "model", "chatgpt"), "assistant"),
    **dict.fromkeys(("tool", "function"), "tool"),
    "system": "system",
}
"""Roles of ShareGPT's speakers; for Megatron-LM any other speaker is the user."""
USERS = ("human", "user")
SYSTEMS = ("system", "system_prompt")


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
    """The messages of a line. Errors: DataError, also for a speaker without a known role, and for no answer."""
    schema = schema_of(line)
    if schema == "openai-messages":
        return [_openai(message) for message in _objects(line, "messages")]
    if schema == "sharegpt":
        given = _objects(line, "conversations")
        for turn in given:
            _check_speaker(text(turn.get("from"), "from"))
        weights = ({"weight": turn["weight"]} if turn.get("weight") is not None else {} for turn in given)
        found = [message | weight for message, weight in zip(sharegpt(line), weights, strict=True)]
    elif isinstance(line.get("prompt"), list) and "completion" in line:
        context = [{**message, "weight": 0} for message in turns(line, "prompt", "user")]
        found = context + turns(line, "completion", "assistant")
    elif schema == "alpaca":
        answers = [name for name in ANSWERS if name in line]
        if all(line[name] is None for name in answers):
            raise DataError(f"{' and '.join(answers)} is null, so there is no answer to learn; remove the line")
        found = _history(line) + alpaca(line)
    else:
        raise DataError(
            "a line of text has no answers; give lines with messages, conversations or questions and answers"
        )
    system = _first(line, SYSTEMS)
    has_own = not system or (bool(found) and found[0]["role"] == "system")
    return found if has_own else [{"role": "system", "content": system}, *found]


def tools_of(line: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The functions of a line that the model may call; a text is read as JSON, as in trl. Errors: DataError."""
    tools = line.get("tools")
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError) as error:
            raise DataError(f"tools is a string that is not JSON ({error}); give a list of objects") from None
    return None if tools is None else _objects({"tools": tools}, "tools")


def turns(line: Mapping[str, Any], key: str, role: str) -> list[Message]:
    """A list of messages, or a text as a message of ``role``; answers must end with one of the assistant."""
    value = line.get(key)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{key} must be a string or a list of messages")
    found = [_openai(message) for message in _objects(line, key)]
    if role == "assistant" and found[-1]["role"] != role:
        raise DataError(f"{key} ends with a message of {found[-1]['role']!r}; it must end with the assistant's answer")
    return found


def alpaca(line: Mapping[str, Any]) -> list[Message]:
    """The question, with its context after an empty line if there is one, and the answer."""
    question, context, answer = (_first(line, names) for names in (QUESTIONS, CONTEXTS, ANSWERS))
    asked = f"{question}\n\n{context}" if context else question
    return [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]


def _history(line: Mapping[str, Any]) -> list[Message]:
    """Earlier turns: pairs of a question and an answer."""
    pairs = line.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise DataError("history must be a list of pairs [question, answer]")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": text(own, "history")} for pair in pairs for role, own in zip(roles, pair, strict=True)
    ]


def sharegpt(line: Mapping[str, Any]) -> list[Message]:
    """Turns with ``from``, the speaker, and ``value``, the text."""
    turns = _objects(line, "conversations")
    return [
        {
            "role": ROLES.get(text(turn.get("from"), "from").lower(), "user"),
            "content": text(turn.get("value"), "value"),
        }
        for turn in turns
    ]


def _check_speaker(speaker: str) -> None:
    if speaker.lower() not in (*USERS, *ROLES):
        raise DataError(
            f"from={shortened(repr(speaker))} is not a known speaker ({', '.join((*USERS, *ROLES))}); rename it, or "
            "give lines with messages, which may have tool_calls"
        )


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
