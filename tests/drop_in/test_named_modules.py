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
            name = old or new
            expected = getattr(home, name) if hasattr(home, name) else import_module(f"{source}.{name}")
            assert getattr(import_module(module), new) is expected


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


def test_names_of_the_table_complete_those_of_a_file() -> None:
    home = import_module("megatron.core.extensions.transformer_engine")
    assert home.TENorm.__module__ == home.__name__ and is_unsupported(home.Fp8Padding)
    assert home.te_general_gemm is None


def test_constants_and_functions_without_effect() -> None:
    for module, values in TABLES["values"].items():
        assert {name: getattr(import_module(module), name) for name in values} == values
    constants = {"": None, "0": 0, "False": False, "True": True}
    for reason, modules in TABLES["constant_functions"].items():
        for module, words in modules.items():
            for word in words.split():
                name, _, value = word.partition("=")
                function = getattr(import_module(module), name)
                assert function(1, option=2) is constants[value]
                assert function.__doc__ == reason


def test_other_modules_are_left_to_python() -> None:
    for name in ("megatron.bridge", "megatron.core.timers", "megatron.core.missing", "deepspeed.missing", "torch"):
        assert named_modules.find_named_module(name) is None
