"""Schemas of instruction data, and conversion to messages that start with a system message."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_core.datasets.base import checked_text
from megatron_core.features.conversations import schemas as message_schemas
from megatron_core.features.conversations.schemas import Message, schema_of

Converter = Callable[[Mapping[str, Any]], list[Message] | str]


def _begun(messages: list[Message]) -> list[Message]:
    has_system = bool(messages) and messages[0]["role"] == "system"
    return messages if has_system else [{"role": "system", "content": ""}, *messages]


def _alpaca_to_messages(sample: Mapping[str, Any]) -> list[Message]:
    return _begun(message_schemas.alpaca(sample))


def _sharegpt_to_messages(sample: Mapping[str, Any]) -> list[Message]:
    return _begun(message_schemas.sharegpt(sample))


def _messages_passthrough(sample: Mapping[str, Any]) -> list[Message]:
    messages = map(message_schemas.openai, sample["messages"])
    turns = [(message["role"], checked_text(message.get("content"), "content")) for message in messages]
    return _begun([{"role": role, "content": content} for role, content in turns])


def _raw_text_loader(sample: Mapping[str, Any]) -> str:
    value = sample.get("text")
    return "" if value is None else checked_text(value, "text")


_CONVERTERS: dict[str, Converter] = {
    "openai-messages": _messages_passthrough,
    "sharegpt": _sharegpt_to_messages,
    "alpaca": _alpaca_to_messages,
    "pretrain-text": _raw_text_loader,
}


def _select_converter(columns: Sequence[str]) -> tuple[Converter, str]:
    name = schema_of(columns)
    return _CONVERTERS[name], name


def _looks_like_hf_id(path: str | None) -> bool:
    """Whether a path is owner/name rather than a file."""
    return path is not None and path.count("/") == 1 and not path.startswith((".", "/"))
