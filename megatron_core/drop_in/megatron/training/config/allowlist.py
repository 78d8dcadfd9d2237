"""Names that a configuration file may use: resolving one must not run code of the file's choice."""

import importlib
import inspect
import logging
import sys
import types
from collections.abc import Callable
from dataclasses import is_dataclass
from typing import Any, Protocol, runtime_checkable

import torch

_PREFIXES = ("megatron.training.", "megatron.core.", "torch.", "transformers.", "signal.")
_EXACT = frozenset({"functools.partial"})
_TORCH_MODULES = ("torch.nn.", "torch.optim.")
_TORCH_KINDS = (torch.dtype, torch.layout, torch.memory_format, types.BuiltinFunctionType)
_REFUSED = (
    "megatron.core.transformer.spec_utils.",
    "megatron.core.msc_utils.",
    "megatron.training.config.allowlist.locate",
    "megatron.training.checkpointing.",
    "megatron.training.activation_logging.",
    "megatron.core.dist_checkpointing.",
    "torch.from_file",
)
"""Functions that import, open or write whatever their arguments name."""


class TargetAllowlist:
    """The targets that ``instantiate`` may resolve: names that begin with a prefix, and exact names.

    The defaults contain Megatron's classes, torch's modules, optimizers, dtypes and built-in functions, configurations
    of transformers, and signals. They leave out functions that load files or run commands, such as ``torch.load``.
    """

    def __init__(self) -> None:
        self._prefixes, self._exact, self._enabled = list(_PREFIXES), set(_EXACT), True

    def is_allowed(self, target: str) -> bool:
        """Whether a configuration may name ``target``."""
        if not self._enabled or target in self._exact:
            return True
        if not any(target.startswith(prefix) for prefix in self._prefixes) or target.startswith(_REFUSED):
            return False
        return _RULES.get(target.split(".")[0], lambda name: True)(target)

    def add_prefix(self, prefix: str) -> None:
        """Allow all names below a package; ValueError without the final dot."""
        if not prefix.endswith("."):
            raise ValueError(f"Prefix must end with '.', but it is {prefix!r}; pass {prefix + '.'!r}")
        if prefix not in self._prefixes:
            self._prefixes.append(prefix)

    def remove_prefix(self, prefix: str) -> None:
        """Remove a prefix; ValueError if it is not there."""
        self._prefixes.remove(prefix)

    def add_exact(self, target: str) -> None:
        """Allow one name."""
        self._exact.add(target)

    def remove_exact(self, target: str) -> None:
        """Remove one name, if it is there."""
        self._exact.discard(target)

    def disable(self) -> None:
        """Allow every name, for configurations that the program itself created."""
        logging.getLogger(__name__).warning("the allow-list is disabled: a configuration may name any function")
        self._enabled = False

    def enable(self) -> None:
        """Check names again."""
        self._enabled = True

    @property
    def enabled(self) -> bool:
        """Whether names are checked."""
        return self._enabled

    @property
    def allowed_prefixes(self) -> tuple[str, ...]:
        """The prefixes, each with a final dot."""
        return tuple(self._prefixes)

    @property
    def allowed_exact(self) -> frozenset[str]:
        """The exact names."""
        return frozenset(self._exact)

    def check_origin(self, target: str, found: Any) -> None:
        """Raise ImportError if ``target`` is another name of a function or class that is not allowed."""
        if not self._enabled or target in self._exact or not callable(found):
            return
        if target.startswith("torch.") and isinstance(found, types.BuiltinFunctionType):
            return  # its module is a private one, which says nothing
        inner = getattr(found, "__func__", found)
        origin = f"{getattr(inner, '__module__', None)}.{getattr(inner, '__qualname__', type(inner).__qualname__)}"
        if not origin.startswith("megatron_core.") and not self.is_allowed(origin):
            raise ImportError(f"{target} is {origin}, which the allow-list does not contain")


def _allows_torch(target: str) -> bool:
    name = target.removeprefix("torch.")
    return target.startswith(_TORCH_MODULES) or isinstance(getattr(torch, name, None), _TORCH_KINDS)


_RULES: dict[str, Callable[[str], bool]] = {
    "torch": _allows_torch,
    # Configurations: models and tokenizers can run code from their folders.
    "transformers": lambda target: target.removesuffix(".from_dict").endswith("Config"),
    # Enumerations and their members: functions send signals.
    "signal": lambda target: target.startswith(("signal.Signals", "signal.Handlers")),
}


def locate(path: str) -> Any:
    """Return the module, class or attribute with a dotted path, importing the longest module in it.

    Attributes are followed only from modules, under their own names, and from classes. Raises ValueError for a path
    with an empty name between two dots, and ImportError if there is no such object.
    """
    if not path:
        raise ImportError("Empty path")
    parts = path.split(".")
    if not all(parts):
        raise ValueError(f"{path!r} is an invalid dotstring: empty name. Relative imports are not supported.")
    for length in range(len(parts), 0, -1):
        name = ".".join(parts[:length])
        try:
            found: Any = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        except Exception as error:
            raise ImportError(f"importing {name!r} for {path!r} failed: {error!r}") from error
        for part in parts[length:]:
            if not inspect.isclass(found) and getattr(found, "__name__", None) != name:
                raise ImportError(f"{path!r}: {name!r} is neither a module nor a class under this name")
            if not hasattr(found, part):
                raise ImportError(f"{path!r}: Are you sure that {part!r} is an attribute of {name!r}?")
            found, name = getattr(found, part), f"{name}.{part}"
        return found
    raise ImportError(f"{path!r}: Unable to import any module in the path; is {parts[0]!r} installed?")


def dataclass_of_program(target: str) -> type | None:
    """Return the dataclass ``target`` of a module that the program has imported itself; None if there is none."""
    module, _, name = target.rpartition(".")
    found = getattr(sys.modules.get(module), name, None)
    return found if inspect.isclass(found) and is_dataclass(found) and found.__module__ == module else None


@runtime_checkable
class Serializable(Protocol):
    """An object that can be written as a dictionary whose ``_target_`` names its class."""

    def as_dict(self) -> dict[str, Any]:
        """Return the dictionary."""

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "Serializable":
        """Return the object of a dictionary."""
