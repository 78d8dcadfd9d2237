"""Every setting is compared with an independent answer, has no numerical effect, or is counted as not yet compared."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from megatron_core.config import RunConfig
from megatron_core.config.run import field_types, section_types
from tests.plain.engine import BASE
from tests.plain.rows import FURTHER_LAYOUTS, LAYOUTS, ROWS
from tests.plain.test_no_effect import WITHOUT_EFFECT
from tests.plain.test_precisions import BOUNDS

ROOT = Path(__file__).parents[2]
NOT_YET = "not yet"
LIMIT = 47
"""Settings, and single values of settings, that no test compares yet. Lower it with each one that a test compares."""
ANSWERS = {"DeepSpeed", "Megatron", "equation", "peft", "transformers", "trl"}
"""The origin of an answer: another library, or an equation that the test evaluates itself."""
REASONS = {"logging", "name", "path"}
"""Why no number depends on a setting."""
KINDS = {"plain", "test", "bits", "none"}
TABLE: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("settings.yaml").read_text())
ENTRIES = {name: entry for section in TABLE.values() for name, entry in section.items()}
DEFAULTS = RunConfig().flat()
LAYOUT_ROWS = {name: ROWS[row] | layout for name, (row, _, layout) in (LAYOUTS | FURTHER_LAYOUTS).items()}
PLAIN_ROWS = {
    name: BASE | values
    for name, values in (LAYOUT_ROWS | ROWS | {name: values for name, (values, _, _) in BOUNDS.items()}).items()
}


def test_every_setting_has_a_row() -> None:
    expected = {section: [setting.name for setting in fields(kind)] for section, kind in section_types().items()}
    assert {section: list(entries) for section, entries in TABLE.items()} == expected


@pytest.mark.parametrize("name", ENTRIES)
def test_row(name: str) -> None:
    entry = ENTRIES[name]
    if entry == NOT_YET:
        return
    kinds = KINDS & entry.keys()
    assert len(kinds) == 1 and entry.keys() <= kinds | {NOT_YET, "answer"}, entry
    kind = kinds.pop()
    CHECKS[kind](name, entry[kind])
    if kind == "test":
        assert entry["answer"] in ANSWERS
    uncompared = entry.get(NOT_YET, [])
    if kind == "none" or "::" in str(entry[kind]):
        assert not uncompared
        return
    cases = PLAIN_ROWS if kind == "plain" else WITHOUT_EFFECT | {"without": {}}
    compared = {value for case in cases.values() for value in values_of(case.get(name, DEFAULTS[name]))}
    assert set(legal_values(name)) - compared == set(uncompared), f"values of {name} that no row has"


def check_plain(name: str, row: str) -> None:
    assert PLAIN_ROWS[row].get(name, DEFAULTS[name]) != DEFAULTS[name], f"{row!r} does not set {name}"


def check_bits(name: str, case: str) -> None:
    if "::" in case:
        check_test(name, case)
    else:
        assert WITHOUT_EFFECT[case].get(name, DEFAULTS[name]) != DEFAULTS[name], f"{case!r} does not set {name}"


def check_test(name: str, case: str) -> None:
    path, _, function = case.partition("::")
    assert function in functions_of(path), f"{path} has no {function}"


def check_none(name: str, word: str) -> None:
    assert word in REASONS, f"{name}: {word}"


CHECKS = {"plain": check_plain, "bits": check_bits, "test": check_test, "none": check_none}


@cache
def functions_of(path: str) -> set[str]:
    """The names of the tests in a file."""
    return set(re.findall(r"^def (test_\w+)\(", (ROOT / path).read_text(), flags=re.MULTILINE))


def values_of(value: Any) -> tuple[Any, ...]:
    """The values that a setting has, each alone if it is a list."""
    return value if isinstance(value, tuple) else (value,)


def legal_values(name: str) -> list[Any]:
    """The values of a setting that has a list of them."""
    kind = field_types()[name]
    parts = [kind, *get_args(kind)]
    return [value for part in parts if get_origin(part) is Literal for value in get_args(part)]


def counts() -> Counter[str]:
    """Settings by the kind of their answer; further values that are not compared count as settings of their own."""
    found: Counter[str] = Counter()
    for entry in ENTRIES.values():
        found[entry if entry == NOT_YET else next(iter(entry))] += 1
        found["further values"] += 0 if entry == NOT_YET else len(entry.get(NOT_YET, []))
    return found


def test_number_that_is_not_compared_falls() -> None:
    number = counts()[NOT_YET] + counts()["further values"]
    assert number <= LIMIT, "compare the new setting with an independent answer"
    assert number == LIMIT, f"only {number} are left; lower LIMIT"


def test_page_has_the_counts() -> None:
    found = counts()
    page = (ROOT / "docs" / "proof.md").read_text()
    words = {"plain": "plain", "test": "test", "bits": "bits", "none": "none", NOT_YET: NOT_YET}
    for kind, word in words.items():
        assert f"| {word} | {found[kind]} |" in page, f"docs/proof.md: {word} is {found[kind]}"
    assert f"{len(ENTRIES)} settings" in page
    assert f"{found['further values']} single values" in page
