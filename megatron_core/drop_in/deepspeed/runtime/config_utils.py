"""Sections of the JSON as objects with attributes."""

from collections.abc import Mapping
from typing import Any, ClassVar

from megatron_core.errors import ConfigError


class DeepSpeedConfigModel:
    """Keys of a section as attributes: those given, and the class's defaults for the others.

    A subclass declares each key as a class attribute with its default. Errors: ``ConfigError`` for an unknown key.
    """

    other_names: ClassVar[Mapping[str, str]] = {}
    """Attributes of keys that have another name."""
    sections: ClassVar[Mapping[str, type["DeepSpeedConfigModel"]]] = {}
    """Classes of keys whose values are sections."""

    def __init__(self, strict: bool = False, **data: Any) -> None:
        self.fields_set = set()  # type: set[str]
        for key, value in data.items():
            name = self.other_names.get(key, key)
            if name not in self.keys():
                raise ConfigError(f"{type(self).__name__}: {key}={value!r} is not a key; use one of {self.keys()}")
            if name in self.sections and isinstance(value, Mapping):
                value = self.sections[name](**value)
            setattr(self, name, value)
            self.fields_set.add(name)

    @classmethod
    def keys(cls) -> list[str]:
        """Names of the keys."""
        found = {name for each in cls.__mro__ for name in vars(each).get("__annotations__", {})}
        return sorted(found - {"other_names", "sections"})

    def dict(self) -> dict[str, Any]:
        """Return the values by key."""
        return {name: getattr(self, name) for name in self.keys()}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.dict().items())})"
