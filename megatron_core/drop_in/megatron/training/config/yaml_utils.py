"""Functions, partials, enumeration members, dtypes and configurations of transformers in YAML."""

import enum
import functools
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
import yaml


@contextmanager
def safe_yaml_representers() -> Iterator[None]:
    """Let ``yaml.safe_dump`` write any object as the ``_target_`` that ``instantiate`` reads, inside this context."""
    dumper = yaml.SafeDumper
    saved = dumper.yaml_representers.copy(), dumper.yaml_multi_representers.copy()
    try:
        for kind in (FunctionType, type):
            dumper.add_representer(kind, _function_representer)
        dumper.add_representer(functools.partial, _partial_representer)
        dumper.add_representer(torch.dtype, _torch_dtype_representer)
        for kind, representer in _kinds_of_transformers().items():
            dumper.add_multi_representer(kind, representer)
        dumper.add_multi_representer(enum.Enum, _enum_representer)
        dumper.add_multi_representer(object, _safe_object_representer)
        yield
    finally:
        dumper.yaml_representers, dumper.yaml_multi_representers = saved


def _kinds_of_transformers() -> dict[Any, Any]:
    try:
        from transformers import GenerationConfig, PretrainedConfig
    except ModuleNotFoundError:
        return {}
    return {GenerationConfig: _generation_config_representer, PretrainedConfig: _pretrained_config_representer}


def _name(value: Any) -> str:
    """Return the dotted path; AttributeError if the object has none."""
    return f"{inspect.getmodule(value).__name__}.{value.__qualname__}"  # type: ignore[union-attr]


def _represent(dumper: Any, target: str, call: bool, **entries: Any) -> Any:
    return dumper.represent_data({"_target_": target, "_call_": call} | entries)


def _function_representer(dumper: Any, data: Any) -> Any:
    """Write the name of a function or class."""
    return _represent(dumper, _name(data), False)


def _torch_dtype_representer(dumper: Any, data: Any) -> Any:
    """Write the name of a dtype."""
    return _represent(dumper, str(data), False)


def _safe_object_representer(dumper: Any, data: Any) -> Any:
    """Write the name of an object, or of its class, which is then called without arguments."""
    try:
        return _represent(dumper, _name(data), False)
    except AttributeError:
        return _represent(dumper, _name(type(data)), True)


def _partial_representer(dumper: Any, data: Any) -> Any:
    """Write the function of a partial with its arguments."""
    entries = {"_target_": _name(data.func), "_partial_": True, "_args_": list(data.args)}
    return dumper.represent_data(entries | data.keywords)


def _enum_representer(dumper: Any, data: Any) -> Any:
    """Write a member of an enumeration: its class is called with its value."""
    return _represent(dumper, _name(type(data)), True, _args_=[data.value], _name_=data.name)


def _generation_config_representer(dumper: Any, data: Any) -> Any:
    """Write a configuration of transformers: ``from_dict`` of its class."""
    return _represent(dumper, f"{_name(data.__class__)}.from_dict", True, config_dict=data.to_dict())


_pretrained_config_representer = _generation_config_representer
