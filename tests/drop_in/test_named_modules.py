"""Modules of Megatron-LM and DeepSpeed that have no file: every row of the table can be imported."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from megatron_core.drop_in import named_modules
from megatron_core.drop_in.unsupported import is_unsupported
from megatron_core.errors import ConfigError
from megatron_core.text_file import read_table

TABLES: dict[str, Any] = read_table(named_modules.__file__)
REFUSED = [(message, *row) for message, rows in TABLES["unsupported"].items() for row in rows.items()]
FOLDER = Path(named_modules.__file__).parent


@pytest.mark.parametrize("module", sorted(TABLES["elsewhere"]))
def test_names_are_those_of_other_modules(module: str) -> None:
    rows = TABLES["elsewhere"][module]
    for row in [rows] if isinstance(rows, str) else rows:
        source, *words = row.split()
        assert words
        for word in words:
            new, _, old = word.partition("=")
            home = import_module(source)
            expected = getattr(home, old or new, None)
            assert getattr(import_module(module), new) is expected is not None


def test_unsupported_names_say_what_to_use() -> None:
    assert len(REFUSED) > 40
    for message, module, words in REFUSED:
        home = import_module(module)
        for word in words.split():
            value = getattr(home, word.removesuffix("()"))
            assert is_unsupported(value) and isinstance(value, type) == (not word.endswith("()"))
            with pytest.raises(ConfigError) as error:
                value(1, option=2)
            assert str(error.value) == message


def test_absent_modules_cannot_be_imported() -> None:
    for module, instead in TABLES["absent"].items():
        with pytest.raises(ImportError, match=r"is not available in megatron_core\.drop_in") as error:
            import_module(module)
        assert str(error.value).endswith(instead) and error.value.name == module


def test_no_module_of_the_table_has_a_file() -> None:
    modules = {*TABLES["elsewhere"], *TABLES["absent"], *(module for _, module, _ in REFUSED)}
    for module in modules:
        path = FOLDER.joinpath(*module.split("."))
        assert not path.with_suffix(".py").exists() and not (path / "__init__.py").exists(), module


def test_other_modules_are_left_to_python() -> None:
    for name in ("megatron.bridge", "megatron.core.utils", "megatron.core.missing", "deepspeed.missing", "torch"):
        assert named_modules.find_named_module(name) is None
