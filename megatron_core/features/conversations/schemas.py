"""Schemas of instruction data: OpenAI's ``messages``, ShareGPT's turns, the columns of Alpaca and Dolly, and trl's
``prompt`` and ``completion``, of which only the completion is learned."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from megatron_core.datasets.base import checked_text
from megatron_core.errors import DataError, shortened
from megatron_core.features.conversations.chat_template import REASONING
from megatron_core.features.conversations.message_keys import DETAILS, FLAGS, check_line, is_learned, without_flags
from megatron_core.features.conversations.tool_calls import objects, with_calls

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
SPEAKERS = {
    **ROLES,
    **dict.fromkeys(USERS, "user"),
    "bot": "assistant",
    **dict.fromkeys(("observation", "tool_response"), "tool"),
}
"""Roles of speakers in the formats of other projects, in lower case."""
CALLS = ("function_call", "tool_call")
"""Speakers whose text is a call of a function, in LLaMA-Factory and ms-swift."""
SYSTEMS = ("system", "system_prompt")
LISTS = {"openai-messages": "messages", "sharegpt": "conversations"}
"""Keys with a list of messages, by schema."""


class Line(NamedTuple):
    """A line of a file of conversations."""

    conversations: list[list[Mapping[str, Any]]]
    tools: list[Mapping[str, Any]] | None
    content: Mapping[str, Any]
    unused: frozenset[str]
    """Keys with a value that neither messages nor tools come from."""
    prompt_length: int | None = None
    """Of preferences: the number of messages before the first in which the two conversations differ."""


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
    hint = "; chosen and rejected are preferences, for --dpo" if "rejected" in columns else ""
    raise DataError(
        f"cannot infer the schema of the columns {', '.join(columns)}; legal: messages, conversations, a question "
        f"({', '.join(QUESTIONS)}) with an answer ({', '.join(ANSWERS)}), or text{hint}"
    )


def messages_of(line: Mapping[str, Any]) -> list[Message]:
    """The messages of a line. Errors: DataError, also for keys whose meaning would be lost, and for no answer."""
    check_line(line)
    schema = schema_of(line)
    if schema in LISTS:
        messages = [_turn(message) for message in objects(line[LISTS[schema]], LISTS[schema])]
    elif isinstance(line.get("prompt"), list) and "completion" in line:
        context = [{**without_flags(message), "weight": 0} for message in turns(line, "prompt", "user")]
        messages = context + turns(line, "completion", "assistant")
    elif schema == "alpaca":
        answers = [name for name in ANSWERS if name in line]
        if all(line[name] is None for name in answers):
            raise DataError(f"{' and '.join(answers)} is null, so there is no answer to learn; remove the line")
        messages = history(line) + alpaca(line)
    else:
        raise DataError(
            "a line of text has no answers; give lines with messages, conversations or questions and answers"
        )
    return with_system(line, messages)


def with_system(line: Mapping[str, Any], messages: list[Message]) -> list[Message]:
    """``messages`` after the system message of the line, unless they have their own."""
    system = _first(line, SYSTEMS)
    has_own = not system or (bool(messages) and messages[0]["role"] == "system")
    return messages if has_own else [{"role": "system", "content": system}, *messages]


def keys_of(line: Mapping[str, Any]) -> set[str]:
    """The keys of a line that ``messages_of`` reads."""
    schema = schema_of(line)
    if schema in LISTS:
        keys = {LISTS[schema]}
    elif isinstance(line.get("prompt"), list) and "completion" in line:
        keys = {"prompt", "completion"}
    else:
        return question_keys(line) | _first_keys(line, ANSWERS)
    return keys | system_keys(line)


def question_keys(line: Mapping[str, Any]) -> set[str]:
    """The keys of a line that a question comes from."""
    return {"history", *_first_keys(line, QUESTIONS, CONTEXTS, SYSTEMS)}


def system_keys(line: Mapping[str, Any]) -> set[str]:
    """The key of a line that a system message comes from."""
    return _first_keys(line, SYSTEMS)


def _first_keys(line: Mapping[str, Any], *choices: tuple[str, ...]) -> set[str]:
    """The first key of each choice that has a value."""
    first_names = (next((name for name in names if line.get(name) is not None), None) for names in choices)
    return {name for name in first_names if name is not None}


def turns(line: Mapping[str, Any], key: str, role: str) -> list[Message]:
    """A list of messages, or a text as a message of ``role``; answers must end with one of the assistant."""
    value = line.get(key)
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if not isinstance(value, list) or not value:
        raise DataError(f"{key} must be a string or a list of messages")
    messages = [_turn(message) for message in objects(line[key], key)]
    answer = messages[-1]
    if role == "assistant" and answer["role"] != role:
        raise DataError(f"{key} ends with a message of {answer['role']!r}; it must end with the assistant's answer")
    return messages


def alpaca(line: Mapping[str, Any]) -> list[Message]:
    """The question, with its context after an empty line if there is one, and the answer."""
    return [asked(line), {"role": "assistant", "content": _first(line, ANSWERS)}]


def asked(line: Mapping[str, Any]) -> Message:
    """The question of a line, with its context after an empty line."""
    question, context = (_first(line, names) for names in (QUESTIONS, CONTEXTS))
    return {"role": "user", "content": f"{question}\n\n{context}" if context else question}


def history(line: Mapping[str, Any]) -> list[Message]:
    """Earlier turns: pairs of a question and an answer."""
    pairs = line.get("history") or []
    if not isinstance(pairs, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in pairs):
        raise DataError("history must be a list of pairs [question, answer]")
    roles = ("user", "assistant")
    return [
        {"role": role, "content": checked_text(text, "history")}
        for pair in pairs
        for role, text in zip(roles, pair, strict=True)
    ]


def sharegpt(line: Mapping[str, Any]) -> list[Message]:
    """Turns with ``from``, the speaker, and ``value``, the text."""
    turns = objects(line["conversations"], "conversations")
    return [
        {
            "role": ROLES.get(checked_text(turn.get("from"), "from").lower(), "user"),
            "content": checked_text(turn.get("value"), "value"),
        }
        for turn in turns
    ]


def _turn(message: Mapping[str, Any]) -> Message:
    """A message of OpenAI's form, or a turn of ShareGPT's with its flags."""
    if is_sharegpt(message):
        role = SPEAKERS.get(checked_text(message.get("from"), "from").lower())
        flags = {key: message[key] for key in (*FLAGS, *DETAILS) if message.get(key) is not None}
        if role is None:
            known = ", ".join(SPEAKERS)
            raise DataError(
                f"from={shortened(repr(message['from']))} is not a known speaker ({known}); rename it, or give lines "
                "with messages, which may have tool_calls"
            )
        turn: Message = {"role": role, "content": checked_text(message.get("value"), "value"), **flags}
    else:
        turn = openai(message)
        role = turn["role"]
        if role.lower() in CALLS:
            raise DataError(
                f"role={role!r} is the text of a call; write a message of the assistant with tool_calls instead"
            )
        turn["role"] = SPEAKERS.get(role.lower(), role)
    is_learned(turn)  # checks its flags
    return turn


def is_sharegpt(message: Mapping[str, Any]) -> bool:
    """Whether a message has the keys of ShareGPT, ``from`` and ``value``, and not those of OpenAI."""
    return "role" not in message and ("from" in message or "value" in message)


def openai(message: Mapping[str, Any]) -> Message:
    """A message of OpenAI's form.

    Text parts are joined; a tool call may have no content. Keys with null are removed, as in transformers.
    """
    message = with_calls(message)
    role = checked_text(message.get("role"), "role")
    content, flags = _joined(message.get("content"))
    if content is not None or not message.get("tool_calls"):
        content = checked_text(content, "content")
    converted = {**message, **flags, "role": role, "content": content}
    for key in REASONING:
        if isinstance(converted.get(key), list):
            converted[key], _ = _joined(converted[key], key)
    return {key: value for key, value in converted.items() if value is not None}


def _joined(content: Any, name: str = "content") -> tuple[Any, dict[str, Any]]:
    """The text of text parts, and their common flag."""
    is_text = isinstance(content, list) and all(
        isinstance(section, dict) and isinstance(section.get("text"), str) for section in content
    )
    if not is_text:
        return content, {}
    values = [{key: section[key] for key in FLAGS if section.get(key) is not None} for section in content]
    if any(value != values[0] for value in values) or (name != "content" and any(values)):
        raise DataError(
            f"the parts of {name} have different flags (train, weight), but a message is learned as a whole or not at "
            "all; remove the flags, or give all parts the same"
        )
    return "".join(section["text"] for section in content), values[0] if values else {}


def _first(line: Mapping[str, Any], names: tuple[str, ...]) -> str:
    return next((checked_text(line[name], name) for name in names if line.get(name) is not None), "")
