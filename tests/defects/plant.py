"""Plants a defect temporarily: changes one fragment of a function's source in the function object itself."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pkgutil import resolve_name
from types import CodeType, FunctionType

PACKAGE = "megatron_core"


@contextmanager
def planted(target: str, old: str, new: str) -> Iterator[None]:
    """Replace ``old``, which must occur exactly once in the source of ``target``, by ``new``.

    In fragments of several lines indentation is relative to the ``def``. ``target`` is ``module:Qualname`` inside the
    package: a function, method, static method or property. Only its code is replaced, so that every reference uses the
    change and forked ranks inherit it.
    """
    function = function_of(target)
    healthy = function.__code__
    function.__code__ = _changed(function, old, new)
    _forget(function)
    try:
        yield
    finally:
        function.__code__ = healthy
        _forget(function)


def _forget(function: FunctionType) -> None:
    """Clear the caches of the function's module, which may have earlier results."""
    for found in function.__globals__.values():
        if hasattr(found, "cache_clear"):
            found.cache_clear()


def function_of(target: str) -> FunctionType:
    """The plain function behind ``target``, without its decorators."""
    found = resolve_name(f"{PACKAGE}.{target}")
    if isinstance(found, property | cached_property):
        return found.fget if isinstance(found, property) else found.func
    return inspect.unwrap(getattr(found, "__func__", found))


def _changed(function: FunctionType, old: str, new: str) -> CodeType:
    lines, first_line = inspect.getsourcelines(function)
    source = textwrap.dedent("".join(lines))
    times = source.count(old)
    assert times == 1, f"{function.__qualname__} has {times} times, not once: {old}"
    definition = ast.parse(source.replace(old, new)).body[0]
    definition.decorator_list.clear()
    # Names from enclosing scopes (``__class__``, for super()) stay free variables if they are local here.
    around = ast.parse(f"def around({', '.join(function.__code__.co_freevars)}): pass")
    around.body[0].body = [definition]
    ast.increment_lineno(around, first_line - 1)
    # ``annotations`` is the feature of the first import, because the library's annotations are never evaluated.
    changed = compile(around, function.__code__.co_filename, "exec", annotations.compiler_flag, dont_inherit=True)
    return _inner(_inner(changed))


def _inner(code: CodeType) -> CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, CodeType))
