"""Syntax trees of functions of the package, and their temporary exchange in the function object itself."""

from __future__ import annotations

import ast
import builtins
import dis
import gc
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper, cached_property
from pkgutil import resolve_name
from types import CodeType, FunctionType

PACKAGE = "megatron_core"


def function_of(target: str) -> FunctionType:
    """The plain function behind ``target``, ``module:Qualname`` inside the package, without its decorators."""
    value = resolve_name(f"{PACKAGE}.{target}")
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, cached_property):
        value = value.func
    return inspect.unwrap(getattr(value, "__func__", value))


def source_of(function: FunctionType) -> tuple[str, int]:
    """The source of a function without its indentation, and the number of its first line."""
    lines, first_line = inspect.getsourcelines(function)
    return textwrap.dedent("".join(lines)), first_line


def definition_of(function: FunctionType, source: str | None = None) -> ast.FunctionDef:
    """The syntax tree of a function, or of its changed ``source``, with the lines of the file."""
    text, first_line = source_of(function)
    definition = ast.parse(source or text).body[0]
    assert isinstance(definition, ast.FunctionDef)
    ast.increment_lineno(definition, first_line - 1)
    return definition


def compiled(function: FunctionType, definition: ast.FunctionDef) -> CodeType:
    """The code of a changed definition, which can replace that of the function."""
    definition.decorator_list.clear()
    free = function.__code__.co_freevars
    # A function keeps the number of its free variables, also of those whose only use the change removes.
    uses = ast.parse("\n".join(["if False:", *(f"    {name}" for name in free)])).body if free else []
    definition.body[:0] = uses
    # Names from enclosing scopes (``__class__``, for super()) stay free variables if they are local here.
    around = ast.parse(f"def around({', '.join(free)}): pass")
    around.body[0].body = [definition]
    ast.fix_missing_locations(around)
    # ``annotations`` is the feature of the first import, because the library's annotations are never evaluated.
    code = compile(around, function.__code__.co_filename, "exec", annotations.compiler_flag, dont_inherit=True)
    return _inner(_inner(code))


def _inner(code: CodeType) -> CodeType:
    return next(constant for constant in code.co_consts if isinstance(constant, CodeType))


def unknown_names(function: FunctionType, code: CodeType) -> set[str]:
    """Global names in changed code that do not exist: those of variables which were renamed in the source."""
    parts = [code]
    for part in parts:
        parts += [constant for constant in part.co_consts if isinstance(constant, CodeType)]
    names = {
        instruction.argval
        for part in parts
        for instruction in dis.get_instructions(part)
        if instruction.opname == "LOAD_GLOBAL"
    }
    return names - function.__globals__.keys() - vars(builtins).keys()


@contextmanager
def exchanged(function: FunctionType, code: CodeType) -> Iterator[None]:
    """Exchange the code of a function, so that every reference uses it and forked ranks inherit it."""
    healthy = function.__code__
    function.__code__ = code
    forget(function)
    try:
        yield
    finally:
        function.__code__ = healthy
        forget(function)


def forget(function: FunctionType) -> None:
    """Clear the caches of the function's module, which may have earlier results."""
    for value in function.__globals__.values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()


class _Caches:
    """All caches of functions of the package."""

    def __init__(self) -> None:
        self._known: dict[int, _lru_cache_wrapper] = {}
        self._modules = 0

    def clear(self) -> None:
        """Clear them; looks for new ones if modules were imported."""
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            wrappers = [value for value in gc.get_objects() if type(value) is _lru_cache_wrapper]  # not of proxies
            self._known |= {id(value): value for value in wrappers if (value.__module__ or "").startswith(PACKAGE)}
        for wrapper in self._known.values():
            wrapper.cache_clear()


forget_all = _Caches().clear
