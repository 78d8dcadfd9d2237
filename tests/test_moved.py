"""Modules are importable by their names of the version before."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest

from megatron_core.moved import MOVED, MOVED_NAMES, full_name, new_name


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_is_the_same_module(old: str, new: str) -> None:
    sys.modules.pop(f"megatron_core.{old}", None)
    with pytest.warns(DeprecationWarning, match=f"has moved to {full_name(new)}"):
        module = importlib.import_module(f"megatron_core.{old}")
    assert module is importlib.import_module(full_name(new))
    assert module.__spec__ is not None
    assert module.__spec__.name == full_name(new)
    assert hasattr(module, "__path__") == (module.__spec__.submodule_search_locations is not None)


def test_modules_of_a_moved_package() -> None:
    assert new_name("megatron_core.training.engine.engine") == "megatron_core.any_model.engine"
    with pytest.warns(DeprecationWarning):
        from megatron_core.training.engine.engine import Engine
    from megatron_core.any_model.engine import Engine as SameEngine

    assert Engine is SameEngine


def test_other_names_are_not_touched() -> None:
    assert new_name("megatron_core.training.engines") is None
    assert new_name("torch.training.engine") is None
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'megatron_core\.training\.nothing'"):
        importlib.import_module("megatron_core.training.nothing")


@pytest.mark.parametrize(("old", "new"), MOVED_NAMES.items())
def test_an_old_name_of_a_package(old: str, new: str) -> None:
    package, _, name = f"megatron_core.{old}".rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} has moved to {full_name(new)}"):
        found = getattr(importlib.import_module(package), name)
    assert found is getattr(importlib.import_module(full_name(new)), name)
    with pytest.raises(AttributeError, match=f"{package}.* attribute '?nothing"):
        importlib.import_module(package).nothing  # noqa: B018


def test_no_old_name_hides_a_name_of_a_package() -> None:
    """A module of a package replaces the package's attribute of the same name when it is imported."""
    for old in MOVED:
        package, _, name = f"megatron_core.{old}".rpartition(".")
        stub = Path(str(importlib.import_module(package).__file__)).with_suffix(".pyi")
        assert not stub.is_file() or not re.search(rf"\bas {name}$", stub.read_text(), flags=re.MULTILINE), old
