"""Every setting is compared with an independent answer, has no numerical effect, or is counted as not yet compared."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml

from megatron_core.config import RunConfig
from megatron_core.config.run import field_types, section_types
from tests.plain.cited import COMPUTED, settings_set
from tests.plain.engine import BASE
from tests.plain.rows import FURTHER_LAYOUTS, LAYOUTS, ROWS
from tests.plain.test_no_effect import WITHOUT_EFFECT
from tests.plain.test_precisions import BOUNDS

ROOT = Path(__file__).parents[2]
NOT_YET = "not yet"
LIMIT = 11
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


PUBLISHED: dict[str, dict[str, Any]] = {
    "DPO, appendix B": {"dpo_beta": 0.1, "dpo_label_smoothing": 0.0},
    "DiLoCo's experiments": {"outer_lr": 0.7, "outer_momentum": 0.9},
    "SOAP's code": {"soap_shampoo_beta": 0.95, "soap_max_precondition_dim": 10_000},
    "Kimi K2, section 2.1": {"qk_clip_threshold": 100.0, "qk_clip_alpha": 0.5},
    "mHC": {"mhc_num_residual_streams": 4, "mhc_sinkhorn_iterations": 20, "mhc_init_gating_factor": 0.01},
    "Phi-3.5-MoE's configuration": {"moe_sparsemixer_threshold": 0.01},
    "DeepSeek-V3.2's configuration": {"dsa_indexer_n_heads": 64, "dsa_indexer_head_dim": 128, "dsa_indexer_topk": 2048},
    "YaRN, section 3.2": {"yarn_beta_fast": 32.0, "yarn_beta_slow": 1.0},
    "Llama 4's configuration": {"query_temperature_floor": 8192},
    "Hinton et al., without a change": {"kd_temperature": 1.0},
    "DeepSpeed's LAMB": {"lamb_max_coeff": 10.0, "lamb_min_coeff": 0.01},
    "DeepSpeed's 1-bit LAMB": {
        **{"onebit_lamb_coeff_beta": 0.9, "onebit_lamb_factor_max": 4.0},
        **{"onebit_lamb_factor_min": 0.5, "onebit_lamb_factor_threshold": 0.1},
    },
    "Megatron-LM's flags": {"fim_rate": 0.5, "fim_spm_rate": 0.5, "mid_level_dataset_surplus": 0.005},
}
"""Defaults that no class of Megatron Core has (``tests/drop_in/megatron_defaults.yaml`` has the others), by origin."""


def test_defaults_are_the_published_values() -> None:
    published = {name: value for values in PUBLISHED.values() for name, value in values.items()}
    assert {name: DEFAULTS[name] for name in published} == published


def test_every_setting_has_a_row() -> None:
    """The table's sections are only for reading: a setting may move to another section."""
    rows = [name for section in TABLE.values() for name in section]
    assert sorted(rows) == sorted(field.name for kind in section_types().values() for field in fields(kind))


def test_every_row_names_a_test_that_exists_and_sets_it() -> None:
    assert [fault for name, entry in ENTRIES.items() if (fault := fault_of(name, entry))] == []


def fault_of(name: str, entry: Any) -> str:
    """The fault of the row of a setting; "" if it is right."""
    if entry == NOT_YET:
        return ""
    kinds = KINDS & entry.keys()
    if len(kinds) != 1 or not entry.keys() <= kinds | {NOT_YET, "answer", "through"}:
        return f"{name}: {entry} is not one of {sorted(KINDS)}"
    kind = kinds.pop()
    case = entry[kind]
    if kind == "none":
        return "" if case in REASONS and NOT_YET not in entry else f"{name}: legal reasons: {sorted(REASONS)}"
    if kind == "test" or "::" in case:
        path, _, function = case.partition("::")
        if function not in functions_of(path) or NOT_YET in entry:
            return f"{name}: {path} has no test {function}"
        if not is_set(name, path, function, entry.get("through")):
            return f"{name}: {case} does not set it"
        return "" if kind == "bits" or entry["answer"] in ANSWERS else f"{name}: legal answers: {sorted(ANSWERS)}"
    cases = PLAIN_ROWS if kind == "plain" else WITHOUT_EFFECT | {"without": {}}
    if cases[case].get(name, DEFAULTS[name]) == DEFAULTS[name]:
        return f"{name}: {case!r} does not set it"
    compared = {value for values in cases.values() for value in values_of(values.get(name, DEFAULTS[name]))}
    left = set(legal_values(name)) - compared
    return "" if left == set(entry.get(NOT_YET, [])) else f"{name}: not compared are {sorted(map(str, left))}"


def is_set(name: str, path: str, function: str, through: str | None) -> bool:
    """Whether a test sets a setting to another value than its default, as its source shows, or the word ``through``."""
    written = settings_set(path, function)
    if through is not None:
        return through in written or f"word {through}" in written
    return any(value is COMPUTED or value != DEFAULTS[name] for value in written.get(name, ()))


def test_citations_of_tests_that_do_not_set_it_are_found() -> None:
    path, function = "tests/plain/test_loop.py", "test_evaluation"
    assert is_set("eval_iters", path, function, None)
    assert not is_set("skip_train", path, function, None)
    assert not is_set("eval_iters", path, function, "evaluations")


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
