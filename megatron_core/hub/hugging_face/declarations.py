"""Registers the architectures of ``declarations.yaml``; its first lines explain the file."""

from importlib import import_module
from typing import Any

from megatron_core.features.presets.published import LAYERS
from megatron_core.hub.hugging_face import families, rules, tensors
from megatron_core.hub.hugging_face.architecture import ARCHITECTURES, Architecture, register
from megatron_core.hub.hugging_face.rules import Settings
from megatron_core.hub.hugging_face.tensors import TensorSource
from megatron_core.hub.hugging_face.text_part import register_text_part
from megatron_core.text_file import read_table

MERGED = ("keys", "fixed", "tensors", "layer_tensors")
"""Fields whose entries are added to those of the parent."""
SHARED_NAMES = {**vars(rules), **vars(tensors)}


def _named(entry: str | Settings) -> Any:
    """The object with a name, ``NAME`` or ``FILE.NAME``, or the result of ``{NAME: ARGUMENTS}``."""
    if isinstance(entry, str):
        family, _, name = entry.rpartition(".")
        names = vars(import_module(f"{families.__name__}.{family}")) if family else SHARED_NAMES
        return names[name]
    [(name, arguments)] = entry.items()
    if isinstance(arguments, dict):
        return _named(name)(**arguments)
    return _named(name)(*([arguments] if isinstance(arguments, str) else arguments))


def _with_tuples(entry: Settings) -> Settings:
    """An entry of the file with tuples for lists."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def _source(entry: str | Settings) -> str | TensorSource:
    """A stored module, the fields of a ``TensorSource``, or a call of a function that returns one."""
    if isinstance(entry, str):
        return entry
    if "names" not in entry:
        return _named(entry)
    rows = entry.get("rows")
    return TensorSource(**_with_tuples(entry) | {"rows": rows and _named(rows)})


def _fields(entry: Settings) -> Settings:
    """The fields of an architecture in an entry of the file."""
    fields = _with_tuples(entry)
    layers = LAYERS[fields.pop("layers_of")] if "layers_of" in fields else {}
    fields["fixed"] = _with_tuples({**layers, **entry.get("fixed", {})})
    for name in ("tensors", "layer_tensors"):
        modules = entry.get(name, {})
        fields[name] = {module: stored and _source(stored) for module, stored in modules.items()}
    if "rules" in fields:
        fields["rules"] = tuple(map(_named, fields["rules"]))
    if "notes" in fields:
        fields["notes"] = _named(fields["notes"])
    if "unread" in fields:
        fields["unread"] = frozenset(fields["unread"])
    return fields


def _declare(model_type: str, entry: Settings) -> None:
    """Register the architecture of an entry."""
    fields = _fields(entry)
    parent = ARCHITECTURES.get(fields.pop("like", ""))
    inherited = {} if parent is None else vars(parent)
    for name in MERGED:
        merged = {**inherited.get(name, {}), **fields.get(name, {})}
        fields[name] = {key: value for key, value in merged.items() if value is not None}
    register(Architecture(**{**inherited, **fields, "model_type": model_type}))


_TABLES = read_table(__file__)
for _model_type, _entry in _TABLES["architectures"].items():
    _declare(_model_type, _entry)
for _model_type, _entry in _TABLES["text_parts"].items():
    register_text_part(_model_type, **_entry)
