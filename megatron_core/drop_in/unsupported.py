"""Stand-ins for names of Megatron's that are not supported: importing them works, using them raises ConfigError."""

from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from megatron_core.errors import ConfigError


def unsupported(message: str) -> Callable[..., NoReturn]:
    """Return a function that raises ConfigError with ``message``."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise ConfigError(message)

    refuse.message = message  # type: ignore[attr-defined]
    return refuse


def constant_function(name: str, value: Any, reason: str) -> Callable[..., Any]:
    """Return a function that takes any arguments and returns ``value``; ``reason`` is its docstring."""

    def returned(*args: Any, **kwargs: Any) -> Any:
        return value

    returned.__name__, returned.__doc__ = name, reason
    return returned


class Unsupported:
    """Base of classes for annotations and ``isinstance``; building an instance raises ConfigError."""

    message: ClassVar[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ConfigError(self.message)


def unsupported_class(path: str, message: str) -> type[Unsupported]:
    """Return a class for programs that import ``path``."""
    module, _, name = path.rpartition(".")
    text = "Stands for the class of this name; building it raises ConfigError."
    return type(name, (Unsupported,), {"message": message, "__module__": module, "__doc__": text})


def refused(path: str, instead: str) -> type[Unsupported]:
    """Return a class in place of DeepSpeed's ``path``; ``instead`` says what to use."""
    return unsupported_class(path, f"{path} is not available in megatron_core.drop_in: {instead}")


def is_unsupported(value: Any) -> bool:
    """Whether ``value`` is such a function or class."""
    if isinstance(value, type):
        return issubclass(value, Unsupported)
    return callable(value) and isinstance(getattr(value, "message", None), str)
