"""The page that lists names for users of Megatron Core."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "imports.md"
ROWS = re.findall(r"^\| `([a-z_0-9.]*)` \| (`.*) \|$", PAGE.read_text(), flags=re.M)


def test_the_page_has_a_table() -> None:
    assert len(ROWS) > 40


@pytest.mark.parametrize(("module", "names"), ROWS, ids=[module for module, _ in ROWS])
def test_names_are_there(module: str, names: str) -> None:
    parent = "megatron." if module.startswith(("training", "rl.")) else "megatron.core."
    home = import_module(f"{parent}{module}".rstrip("."))
    assert [name for name in re.findall(r"`(\w+)`", names) if not hasattr(home, name)] == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    for package in ("", ".transformer", ".optimizer", ".models.gpt"):
        with pytest.raises(AttributeError, match="no attribute 'missing'"):
            _ = import_module(f"megatron.core{package}").missing
