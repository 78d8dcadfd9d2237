"""Each defect that other tests plant as a fragment of source fits the source, also those of ``make verify-all``."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.defects.plant import planted
from tests.defects.source import function_of

TESTS = Path(__file__).resolve().parents[1]
TARGET = re.compile(r"[\w.]+:[\w.]+")


def _tables() -> Iterator[tuple[str, str, str, str]]:
    """(Module, target, old, new) of each text in a table of a test module, and in a call of ``planted``."""
    for path in sorted(TESTS.rglob("test_*.py")):
        source = path.read_text(encoding="utf-8")
        if "planted(" not in source or path.parent.name == "defects":
            continue
        name = ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)
        calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
        literals = [tuple(getattr(word, "value", None) for word in call.args) for call in calls]
        for entry in _texts([list(vars(importlib.import_module(name)).values()), literals]):
            yield name, *entry[:3]


def _texts(value: Any) -> Iterator[tuple[str, ...]]:
    """The entries (target, old, new, ...) in tables within tables."""
    if _is_text(value):
        yield value
    elif isinstance(value, dict | list | tuple):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _is_text(entry: Any) -> bool:
    if not isinstance(entry, tuple) or len(entry) < 3 or not all(isinstance(part, str) for part in entry[:3]):
        return False
    return _names_a_function(entry[0])


def _names_a_function(text: str) -> bool:
    module = TESTS.parent.joinpath("megatron_core", *text.partition(":")[0].split("."))
    return TARGET.fullmatch(text) is not None and not text.endswith(".") and module.with_suffix(".py").is_file()


def test_every_fragment_is_found() -> None:
    tables = list(_tables())
    assert len(tables) > 100
    faults = []
    for name, target, old, new in tables:
        try:
            with planted(target, old, new):
                pass
        except (AssertionError, AttributeError, ImportError, SyntaxError) as error:
            faults.append(f"{name}: {error}")
    assert not faults, "\n".join(faults)


def _targets() -> Iterator[tuple[Path, str]]:
    """The text of each function of the package, such as "optimizer.clip:clip_factor", in a test."""
    for path in sorted(TESTS.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and _names_a_function(text):
                yield path, text


def test_every_function_exists() -> None:
    """Also of defects that only long tests plant."""
    targets = list(_targets())
    assert len(targets) > 300
    faults = []
    for path, target in targets:
        try:
            function_of(target)
        except (AttributeError, ImportError) as error:
            faults.append(f"{path.relative_to(TESTS)} {target}: {error}")
    assert not faults, "\n".join(faults)


def test_an_outdated_fragment_is_noticed() -> None:
    with pytest.raises(AssertionError, match="has 0 times"), planted("optimizer.clip:clip_factor", "missing text", ""):
        pass
