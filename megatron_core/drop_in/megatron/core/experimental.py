"""Marks functions and classes that only work while ``config.ENABLE_EXPERIMENTAL`` is set."""

import functools
import logging
from collections.abc import Callable
from typing import Any

from megatron.core import config
from megatron.core.ranks import log_single_rank

_LOGGER = logging.getLogger("megatron.core.utils")
"""The logger that programs for Megatron configure."""


class ExperimentalNotEnabledError(Exception):
    """An experimental function was used without ``config.set_experimental_flag(True)``."""


def experimental_fn(introduced_with_version: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator of a function that raises ExperimentalNotEnabledError without the flag.

    The first call writes a line to the log. ``introduced_with_version`` is documentation.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        checked = _Check(function.__name__)

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            checked()
            return function(*args, **kwargs)

        return call

    return decorate


def experimental_cls(introduced_with_version: str) -> Callable[[type], type]:
    """Return a decorator of a class that raises ExperimentalNotEnabledError without the flag.

    Creating an instance and reading an attribute of the class are checked. ``is_experimental`` is the flag.
    """

    def decorate(kind: type) -> type:
        checked, base = _Check(kind.__name__), type(kind)

        def find(own: Any, name: str) -> Any:
            if name == "is_experimental":
                return config.is_experimental_enabled()
            if not name.startswith("__"):
                checked()
            return base.__getattribute__(own, name)

        def build(own: Any, *args: Any, **kwargs: Any) -> Any:
            checked()
            return base.__call__(own, *args, **kwargs)

        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
        guard = type(kind.__name__, (base,), {"__getattribute__": find, "__call__": build} | names)
        flag = property(lambda self: config.is_experimental_enabled())
        guarded: type = guard(kind.__name__, (kind,), {"is_experimental": flag} | names)
        return guarded

    return decorate


class _Check:
    """Raises without the flag; writes one line to the log."""

    def __init__(self, name: str) -> None:
        self._name, self._logged = name, False

    def __call__(self) -> None:
        if not config.is_experimental_enabled():
            raise ExperimentalNotEnabledError(f"{self._name} is experimental; call config.set_experimental_flag(True)")
        if not self._logged:
            self._logged = True
            log_single_rank(_LOGGER, logging.INFO, "ENABLE_EXPERIMENTAL is True, running experimental code.")
