"""Functions that a model may call, and its calls, in the forms of OpenAI and of `transformers`."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megatron_core.errors import DataError, shortened

Message = Mapping[str, Any]


def tools_of(line: Mapping[str, Any]) -> list[Mapping[str, Any]] | None:
    """The functions of a line that the model may call. Errors: DataError.

    A text is read as JSON, as in trl, and so are the parameters of a function, as in axolotl. ``functions`` is
    OpenAI's older form of ``tools``.
    """
    tools = line.get("tools")
    if isinstance(tools, str):
        tools = _json(tools, "tools") if tools.strip() else None
    if tools is None and line.get("functions"):
        tools = [{"type": "function", "function": function} for function in objects(line["functions"], "functions")]
    if tools is None:
        return None
    return [_mapped(tool, "parameters", _decoded) for tool in objects(tools, "tools")]


def with_calls(message: Message) -> dict[str, Any]:
    """A message with ``function_call``, OpenAI's older form of ``tool_calls``, in the present form."""
    call = message.get("function_call")
    if call is None or message.get("tool_calls"):
        return dict(message)
    if not isinstance(call, Mapping):
        raise DataError(f"function_call={shortened(repr(call))} must be an object with name and arguments")
    other_keys = {key: value for key, value in message.items() if key != "function_call"}
    return {**other_keys, "tool_calls": [{"type": "function", "function": dict(call)}]}


def decoded(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have arguments as objects, the form that templates expect; OpenAI's are JSON texts."""
    return [_with_arguments(message, _decoded) for message in messages]


def encoded(messages: Sequence[Message]) -> list[Message]:
    """Messages whose calls have arguments as JSON texts, which some templates expect; given texts are not changed."""
    return [_with_arguments(message, _encoded) for message in messages]


def arguments_of(message: Message) -> Iterator[Any]:
    """The arguments of each call of a message."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping) and "arguments" in function:
            yield function["arguments"]


def names_of(message: Message) -> Iterator[str]:
    """The name of the function of each call of a message."""
    for call in message.get("tool_calls") or ():
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping) and isinstance(function.get("name"), str):
            yield function["name"]


def _with_arguments(message: Message, change: Callable[[Any, str], Any]) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_mapped(call, "arguments", change) for call in objects(calls, "tool_calls")]}


def _mapped(entry: Mapping[str, Any], key: str, change: Callable[[Any, str], Any]) -> Mapping[str, Any]:
    """An object with ``key`` changed, which is in its ``function`` or in itself."""
    function = entry.get("function")
    if isinstance(function, Mapping):
        return {**entry, "function": _mapped(function, key, change)}
    return {**entry, key: change(entry[key], key)} if key in entry else entry


def _decoded(value: Any, key: str) -> Any:
    if not isinstance(value, str):
        return value
    content = _json(value, key) if value.strip() else {}
    if not isinstance(content, dict):
        raise DataError(f"{key} is the JSON text of a {type(content).__name__}, expected that of an object")
    return content


def _encoded(value: Any, key: str) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(value: str, key: str) -> Any:
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{key} is a string that is not JSON ({error}); correct it") from None


def objects(value: Any, name: str) -> list[Mapping[str, Any]]:
    """The objects under the key ``name``. Errors: ``DataError`` for anything but a list of objects."""
    if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
        raise DataError(f"{name} must be a list of objects")
    return value
