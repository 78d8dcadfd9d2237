"""Values of settings in text: conversion to their types, and hints for messages."""

import difflib
import types
import typing
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any, Literal

ALL = "all"
"""The topic of the complete help."""

ALL_SETTINGS = f"--help {ALL} lists every setting"


def perhaps(name: str, known: Iterable[str], prefix: str = "", otherwise: str = ALL_SETTINGS) -> str:
    """A hint at known names that are similar to an unknown one; ``otherwise`` if there is none."""
    close = difflib.get_close_matches(name, list(known), n=3, cutoff=0.6)
    suggestion = " or ".join(prefix + (candidate.replace("_", "-") if prefix else candidate) for candidate in close)
    return f"perhaps you meant {suggestion}" if close else otherwise


def fits(value: Any, annotation: Any) -> bool:
    """Whether ``value`` has the type ``annotation`` of a setting; numbers of numpy are numbers."""
    options = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return value in options
    if origin is tuple:
        if not isinstance(value, tuple):
            return False
        kinds = options[:1] * len(value) if options[-1] is Ellipsis else options
        return len(kinds) == len(value) and all(map(fits, value, kinds))
    if options:
        return any(fits(value, option) for option in options)
    if isinstance(value, bool):
        return annotation is bool
    return isinstance(value, {int: Integral, float: Real}.get(annotation, annotation))


def convert(value: Any, annotation: Any) -> Any:
    """``value`` converted to type ``annotation``; ``ValueError`` or ``TypeError`` if it does not fit.

    Strings are accepted as numbers because YAML 1.1 reads ``1e-3`` as a string.
    """
    options = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        if value is None or value == "None":
            return None
        return convert(value, next(option for option in options if option is not type(None)))
    if typing.get_origin(annotation) is Literal:
        return options[[str(option) for option in options].index(_convert_plain(value, str))]
    if typing.get_origin(annotation) is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        kinds = [options[0]] * len(items) if options[-1] is Ellipsis else options
        return tuple(convert(item, item_type) for item, item_type in zip(items, kinds, strict=True))
    return _convert_plain(value, annotation)


def _convert_plain(value: Any, value_type: type) -> Any:
    """``value`` as bool, int, float or str."""
    if (value_type is bool) != isinstance(value, bool) or not isinstance(value, bool | int | float | str):
        raise TypeError
    if value_type is int:
        number = float(value) if isinstance(value, str) else value
        if number != int(number):
            raise ValueError
        integer = int(value) if isinstance(value, str) and value.lstrip("+-").isdigit() else int(number)
        if abs(integer) >= 2**63:
            raise OverflowError
        return integer
    return value_type(value)


def describe_type(annotation: Any, nothing: str = "null") -> str:
    """The legal values of a type, for messages; ``nothing`` stands for None."""
    options = typing.get_args(annotation)
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " or ".join(nothing if option is type(None) else describe_type(option) for option in options)
    if typing.get_origin(annotation) is Literal:
        return ", ".join(map(str, options))
    if typing.get_origin(annotation) is tuple:
        if options[-1] is not Ellipsis:
            return f"a list of {len(options)} integers"
        plural = {str: "strings", int: "integers"}.get(options[0])
        return f"a list of {plural or describe_type(options[0])}"
    return {bool: "true or false", int: "an integer", float: "a number", str: "a string"}[annotation]
