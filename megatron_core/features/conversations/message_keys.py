"""Keys of lines and messages that other projects give a meaning: obeyed, refused, or counted as ignored."""

import json
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from megatron_core.errors import DataError, shortened
from megatron_core.text_file import read_table

_TABLES = read_table(__file__)
FLAGS: dict[str, bool] = _TABLES["flags"]
ONLY_ANSWERS, DETAILS, MEDIA, TOKENS, LINE_WEIGHTS, JUDGEMENTS = (
    tuple(_TABLES[name]) for name in ("only_answers", "details", "media", "tokens", "line_weights", "judgements")
)
RESERVED = frozenset(chain.from_iterable(_TABLES["reserved"]))
VARIABLES = "chat_template_kwargs"


def is_learned(message: Mapping[str, Any]) -> bool:
    """Whether a message counts in the loss: its role is assistant, and none of its flags excludes it."""
    for key in DETAILS:
        if message.get(key) is not None:
            raise DataError(
                f"{key}={_shown(message[key])} on a message is not supported, because a message is learned "
                "as a whole or not at all; remove the key, or give weight 0 or 1"
            )
    values = {key: _flag(message[key], key) for key in FLAGS if message.get(key) is not None}
    learned = {key: value == FLAGS[key] for key, value in values.items()}
    if len(set(learned.values())) > 1:
        flags_given = " and ".join(f"{key}={_shown(message[key])}" for key in learned)
        raise DataError(f"{flags_given} of one message contradict each other; remove one of them")
    if message["role"] != "assistant":
        for key in learned:
            if learned[key] and key not in ONLY_ANSWERS:
                raise DataError(
                    f"{key}={_shown(message[key])} asks for a loss on a message of the role "
                    f"{_shown(message['role'])}, but only messages of the assistant are learned; remove it"
                )
        return False
    return all(learned.values())


def without_flags(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message for the chat template."""
    return {key: value for key, value in message.items() if key not in FLAGS}


def _flag(value: Any, key: str) -> bool:
    if not isinstance(value, (bool, int, float)) or value not in (0, 1):
        wanted = "0 (the answer is not learned) or 1" if key == "weight" else "0, 1, true or false"
        raise DataError(f"{key}={_shown(value)} must be {wanted}")
    return bool(value)


def check_line(line: Mapping[str, Any]) -> None:
    """DataError for keys of a line whose meaning would be lost."""
    for key in MEDIA:
        if line.get(key):
            raise DataError(f"{key}={_shown(line[key])}: only text is supported; remove the line, or the key")
    for key in TOKENS:
        if isinstance(line.get(key), list):
            raise DataError(
                f"{key} has a value for each token, but messages are tokenized here; remove the key, or the messages"
            )
    for key in LINE_WEIGHTS:
        wanted = FLAGS.get(key, True)
        if line.get(key) is not None and line[key] not in (wanted, float(wanted)):
            raise DataError(
                f"{key}={_shown(line[key])} on a line is not supported: all lines have the same weight; remove the "
                "line, or the key"
            )
    for key in JUDGEMENTS:
        if line.get(key) is False:
            raise DataError(
                f"{key}=false marks a bad answer, which would be learned as a good one; remove the line, or the key"
            )
    mask = line.get("mask")
    if mask is not None and not (isinstance(mask, str) and mask.lower() in ("user", "human")):
        raise DataError(
            f"mask={_shown(mask)} on a line is not supported; the assistant's messages are learned: remove it"
        )


def template_variables(line: Mapping[str, Any], unused: Iterable[str], read: frozenset[str]) -> Mapping[str, Any]:
    """The variables that a line gives to its chat template; ``read`` are those that the template reads.

    A key ``unused`` of the line with the name of such a variable is a DataError.
    """
    for key in sorted(unused):
        if key in read and line[key] is not None:
            raise DataError(
                f"{key}={_shown(line[key])} is a variable of the chat template; write it as "
                f'"{VARIABLES}": {json.dumps({key: line[key]})[:200]}'
            )
    variables = line.get(VARIABLES) or {}
    if not isinstance(variables, Mapping):
        raise DataError(f"{VARIABLES}={_shown(variables)} must be an object with variables of the chat template")
    for key in variables:
        if key in RESERVED:
            raise DataError(
                f"{VARIABLES} has {key}, a parameter of apply_chat_template and no variable of a template; remove it"
            )
    return variables


def _shown(value: Any) -> str:
    """A value of JSON, shortened."""
    return shortened(json.dumps(value, ensure_ascii=False), 80)
