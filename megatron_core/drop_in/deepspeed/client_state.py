"""The program's own state in checkpoints: Python values and tensors as JSON, without pickle."""

import base64
import math
import sys
from argparse import Namespace
from collections.abc import Mapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_core.errors import CheckpointError

KIND = "__kind__"
"""Key of an object that stands for a value that JSON does not have."""


def encode(value: Any, name: str = "client_state") -> Any:
    """Return ``value`` as JSON: numbers, texts, None, lists, tuples, dicts, tensors, arrays, bytes, dtypes of torch,
    members of an Enum of an imported module, and the namespace of a parser of arguments.

    Errors: ``CheckpointError`` for other types, with the name of the entry.
    """
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {KIND: "float", "text": repr(value)}
    if type(value) is list:
        return [encode(each, f"{name}[{at}]") for at, each in enumerate(value)]
    if type(value) is tuple:
        return {KIND: "tuple", "items": encode(list(value), name)}
    if isinstance(value, Mapping):
        plain = all(type(key) is str for key in value) and KIND not in value
        if plain:
            return {key: encode(each, f"{name}[{key!r}]") for key, each in value.items()}
        pairs = [[encode(key, name), encode(each, f"{name}[{key!r}]")] for key, each in value.items()]
        return {KIND: "dict", "items": pairs}
    if isinstance(value, Tensor):
        data = value.detach().cpu().contiguous()
        dtype = str(data.dtype).removeprefix("torch.")
        raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
        return {KIND: "tensor", "dtype": dtype, "shape": list(data.shape), "data": _text(raw)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        is_scalar = isinstance(value, np.generic)
        shape = list(value.shape)
        return {
            KIND: "scalar" if is_scalar else "array",
            "dtype": value.dtype.str,
            "shape": shape,
            "data": _text(value.tobytes()),
        }
    if type(value) is bytes:
        return {KIND: "bytes", "data": _text(value)}
    if type(value) is Namespace:
        return {KIND: "namespace", "items": encode(vars(value), name)}
    if isinstance(value, Enum) and _is_named(value):
        return {KIND: "enum", "module": type(value).__module__, "class": type(value).__qualname__, "member": value.name}
    if isinstance(value, torch.dtype):
        return {KIND: "dtype", "text": str(value).removeprefix("torch.")}
    raise CheckpointError(
        f"{name} is a {type(value).__name__}, which a checkpoint without pickle cannot store; give numbers, strings, "
        "lists, tuples, dicts, tensors or arrays"
    )


def decode(value: Any) -> Any:
    """Return the value that ``encode`` was given."""
    if isinstance(value, list):
        return [decode(each) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(KIND)
    if kind is None:
        return {key: decode(each) for key, each in value.items()}
    try:
        return _decode(kind, value)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"client_state has a damaged entry of kind {kind!r} ({error}); load another tag"
        ) from error


def _decode(kind: str, value: dict[str, Any]) -> Any:
    if kind == "tuple":
        return tuple(decode(value["items"]))
    if kind == "dict":
        return {decode(key): decode(each) for key, each in value["items"]}
    if kind == "float":
        return float(value["text"])
    if kind == "namespace":
        return Namespace(**decode(value["items"]))
    if kind == "enum":
        enum_class = _enum_class(value["module"], value["class"])
        if enum_class is None:
            raise CheckpointError(
                f"client_state has a member of {value['module']}.{value['class']}, which is not an Enum that this "
                f"program has imported; import it before load_checkpoint"
            )
        return enum_class[value["member"]]
    if kind == "dtype":
        return torch.empty(0, dtype=getattr(torch, value["text"])).dtype  # TypeError for other names of torch
    raw = base64.b64decode(value["data"])
    if kind == "bytes":
        return raw
    if kind == "tensor":
        dtype = getattr(torch, value["dtype"])
        return (
            torch.frombuffer(bytearray(raw), dtype=dtype).reshape(value["shape"])
            if raw
            else torch.empty(value["shape"], dtype=dtype)
        )
    array = np.frombuffer(bytearray(raw), np.dtype(value["dtype"])).reshape(value["shape"])
    return array[()] if kind == "scalar" else array


def _enum_class(module: str, qualified_name: str) -> type[Enum] | None:
    """The Enum of a module that the program has imported: a file must not choose modules to import."""
    value: Any = sys.modules.get(module)
    for name in qualified_name.split("."):
        value = getattr(value, name, None)
    return value if isinstance(value, type) and issubclass(value, Enum) else None


def _is_named(member: Enum) -> bool:
    """Whether the names of its module, class and member find ``member``: not in a function's class, nor ``A | B``."""
    enum_class = type(member)
    is_found = _enum_class(enum_class.__module__, enum_class.__qualname__) is enum_class
    return is_found and enum_class.__members__.get(member.name) is member


def _text(raw: bytes) -> str:
    return base64.b64encode(raw).decode("ascii")
