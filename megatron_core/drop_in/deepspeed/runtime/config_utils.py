"""Sections of the JSON as pydantic models."""

from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from deepspeed.utils.logging import logger
from megatron_core.errors import ConfigError, quoted


def reader(path: str, text: str) -> Callable[[Any], Any]:
    """Return a method with the docstring ``text`` that returns the attribute ``path``."""

    def read(self: Any) -> Any:
        return attrgetter(path)(self)

    read.__doc__ = text
    return read


class DeepSpeedConfigModel(BaseModel):
    """Keys of a section with types that pydantic checks; "auto" counts as absent unless ``strict`` is true.

    A field with ``json_schema_extra={"deprecated": True, "new_param": "name"}`` sets the field ``name`` with a warning:
    to its own value, or to the result of ``new_param_fn``; with ``set_new_param`` false it does not. Errors:
    ``ValidationError`` for unknown keys and values of the wrong type; ``ConfigError`` if both fields are given.
    """

    model_config = ConfigDict(
        validate_default=True,
        validate_assignment=True,
        use_enum_values=True,
        populate_by_name=True,
        extra="forbid",
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    def __init__(self, strict: bool = False, **data: Any) -> None:
        super().__init__(**{key: value for key, value in data.items() if strict or not _is_auto(value)})
        for old, field in type(self).model_fields.items():
            extra = field.json_schema_extra
            if old in self.model_fields_set and isinstance(extra, Mapping) and extra.get("deprecated"):
                self._replace(old, extra)

    def _replace(self, old: str, extra: Mapping[str, Any]) -> None:
        new = extra.get("new_param", "")
        logger.warning("Config parameter %s is deprecated%s", old, f"; use {new}" if new else "")
        if new and extra.get("set_new_param", True):
            if new in self.model_fields_set:
                raise ConfigError(f"{old} and {new} are given; remove {old}, which is deprecated")
            setattr(self, new, extra.get("new_param_fn", lambda value: value)(getattr(self, old)))


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


Model = TypeVar("Model", bound=DeepSpeedConfigModel)


def section_as(kind: type[Model], name: str, values: Mapping[str, Any]) -> Model:
    """Return the section ``name`` of the JSON, "" for its top; ``ConfigError`` names the first wrong key."""
    try:
        return kind(**values)
    except ValidationError as error:
        first = error.errors()[0]
        path = ".".join(filter(None, (name, *map(str, first["loc"]))))
        raise ConfigError(f"{path}={quoted(first['input'])}: {first['msg']}") from error
