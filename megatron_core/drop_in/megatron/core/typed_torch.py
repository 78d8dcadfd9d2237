"""Helpers for type checkers."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, TypeVar

from torch import nn

Value = TypeVar("Value")


def apply_module(m: Any, *, check_subclass: bool = True) -> Any:
    """Return the module; TypeError if it is not an ``nn.Module`` and ``check_subclass`` is set."""
    if check_subclass and not isinstance(m, nn.Module):
        raise TypeError(f"{type(m)} is not a subclass of torch.nn.Module; pass a module or check_subclass=False")
    return m


def not_none(value: Value | None) -> Value:
    """Return the value; ValueError if it is None."""
    if value is None:
        raise ValueError("Expected value to be not None; set it before this call")
    return value


def copy_signature(
    source: Callable[..., Any],
    /,
    *,
    handle_return_type: Literal["preserve", "overwrite"] = "preserve",
    handle_first_src_param: Literal["copy", "skip"] = "copy",
    handle_first_dst_param: Literal["preserve", "drop"] = "drop",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that gives a function the signature of ``source``.

    The return type is the function's own or that of ``source`` (overwrite). The first parameter of ``source`` may be
    left out (skip), and the function's own first parameter kept (preserve), as for ``self``.
    """
    given = inspect.signature(source)

    def decorate(function: Callable[..., Any], /) -> Callable[..., Any]:
        own = inspect.signature(function)
        first = list(own.parameters.values())[: handle_first_dst_param == "preserve"]
        others = list(given.parameters.values())[handle_first_src_param == "skip" :]
        kept = own.return_annotation if handle_return_type == "preserve" else given.return_annotation
        marked: Any = function
        marked.__signature__ = own.replace(parameters=[*first, *others], return_annotation=kept)
        return function

    return decorate
