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
    """(Module and key, target, old, new) of each entry (target, old, new, ...) of a table in a test module."""
    for path in sorted(TESTS.rglob("test_*.py")):
        if "planted(" not in path.read_text(encoding="utf-8") or path.parent.name == "defects":
            continue
        name = ".".join(path.relative_to(TESTS.parent).with_suffix("").parts)
        for table in vars(importlib.import_module(name)).values():
            for key, entry in table.items() if isinstance(table, dict) else ():
                if _is_text(entry):
                    yield f"{name} {key}", *entry[:3]


def _is_text(entry: Any) -> bool:
    if not isinstance(entry, tuple) or len(entry) < 3 or not all(isinstance(part, str) for part in entry[:3]):
        return False
    return TARGET.fullmatch(entry[0]) is not None


def test_every_fragment_is_found() -> None:
    tables = list(_tables())
    assert len(tables) > 60
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
            if isinstance(text, str) and TARGET.fullmatch(text) and not text.endswith("."):
                module = TESTS.parent.joinpath("megatron_core", *text.partition(":")[0].split("."))
                if module.with_suffix(".py").is_file():
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
