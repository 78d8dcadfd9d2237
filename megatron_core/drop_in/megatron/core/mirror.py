"""Bases of Megatron's configuration classes, whose fields are settings of the engine and ``mirror.yaml``."""

from collections.abc import Iterator
from dataclasses import MISSING, Field, field, fields, make_dataclass
from functools import cache
from typing import Any, get_type_hints

from megatron_core.config.run import section_types
from megatron_core.errors import ConfigError
from megatron_core.text_file import read_table


@cache
def _settings() -> dict[str, tuple[Any, Any]]:
    """Type and default of every setting of the engine, by name."""
    found: dict[str, tuple[Any, Any]] = {}
    for section in section_types().values():
        types, default = get_type_hints(section), section()
        found |= {each.name: (types[each.name], getattr(default, each.name)) for each in fields(section)}
    return found


@cache
def _tables() -> dict[str, dict[str, Any]]:
    return read_table(__file__)


def mirror(name: str, *, kw_only: bool = False) -> Any:
    """Return a dataclass with the fields that ``mirror.yaml`` lists for the class ``name``, as a base of that class.

    Type checkers treat such a base as ``Any``: they accept every attribute and every keyword of the constructor.
    """
    table = _tables()[name]
    first = table.get("first", "").split()
    rows = sorted(_fields(table), key=lambda row: first.index(row[0]) if row[0] in first else len(first))
    return make_dataclass(f"_{name}Fields", rows, kw_only=kw_only)


def _fields(table: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Name, type and field of each row; ``metadata`` has the name of the engine's setting, or ``refused``."""
    renamed = {own: own for own in (*table.get("same", "").split(), *table.get("defaults", {}))}
    renamed |= table.get("renamed", {})
    for own, setting in renamed.items():
        kind, default = _settings()[setting]
        default = table.get("defaults", {}).get(own, default)
        yield own, kind if default is not None else kind | None, _field(default, setting=setting)
    for role in ("ignored", "refused"):
        for own, default in table.get(role, {}).items():
            yield own, Any if default is None else type(default), _field(default, **{role: True})


def _field(default: Any, **metadata: Any) -> Any:
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def default_of(item: Field[Any]) -> Any:
    """Return the default of a field, or the result of its factory."""
    return item.default if item.default_factory is MISSING else item.default_factory()


def refused_changes(settings: Any) -> list[str]:
    """Return the names of unsupported fields that differ from their defaults; an empty value equals None."""
    found = []
    for item in fields(settings):
        value = getattr(settings, item.name)
        equal = value == item.default or (item.default is None and value in (False, [], ()))
        if "refused" in item.metadata and not equal:
            found.append(item.name)
    return found


def refuse_changes(settings: Any) -> None:
    """Raise ConfigError if unsupported fields differ from their defaults."""
    if wrong := refused_changes(settings):
        name = type(settings).__name__.removeprefix("_").removesuffix("Fields")  # a base itself
        raise ConfigError(f"{name}: {', '.join(wrong)} is not supported; remove it")
