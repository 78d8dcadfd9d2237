"""Mutations are numbered, the same in every run, legal Python, and reported with what became of them."""

from __future__ import annotations

import ast
import fnmatch
from collections import Counter

import pytest

from tests.defects.source import compiled, definition_of, exchanged, function_of
from tests.mutants.edits import mutants_of
from tests.mutants.examine import FOUND, NOT_EXECUTED, SURVIVED, Verdict
from tests.mutants.report import EQUIVALENT, KINDS, NO_NUMBER, REASONS, judged_by_all, latest, summary
from tests.mutants.targets import functions, modules

CLIP = "optimizer.clip:clip_factor"
SOURCE = """
def forward(x: Tensor, group, size: int = 3) -> Tensor:
    if size < 1:
        raise ValueError(f"size={size + 1}")
    total = all_reduce(x[: size - 1].sum(-1), group, mean=True)
    total.add_(1.5)
    return total.detach() if size == 2 else -total
"""


def test_changes() -> None:
    """Messages, defaults and conditions of errors are left out."""
    (definition,) = ast.parse(SOURCE).body
    assert isinstance(definition, ast.FunctionDef)
    mutants = mutants_of("module:forward", definition)
    changed = [ast.unparse(mutant.build()).splitlines() for mutant in mutants]
    before = ast.unparse(definition).splitlines()
    lines = {line.strip() for text in changed for line in text if line not in before}
    assert {
        "total = all_reduce(x[:size + 1].sum(-1), group, mean=True)",
        "total = all_reduce(x[:size - 1 + 1].sum(-1), group, mean=True)",
        "total = all_reduce(x[:size - 1].mean(-1), group, mean=True)",
        "total = all_reduce(x[:size - 1].sum(-2), group, mean=True)",
        "total = all_reduce(group, x[:size - 1].sum(-1), mean=True)",
        "total = all_reduce(x[:size - 1].sum(-1), group)",
        "total = x[:size - 1].sum(-1)",
        "total.add_(3.0)",
        "total.sub_(1.5)",
        "pass",
        "return total if size == 2 else -total",
        "return total.detach() if size != 2 else -total",
        "return total.detach() if size == 2 else total",
        "return (total.detach() if size == 2 else -total).detach()",
    } <= lines
    assert not any("size <=" in line or "size: int = 4" in line for line in lines)
    assert [mutant.name for mutant in mutants] == [f"module:forward#{number}" for number in range(len(mutants))]
    assert len({tuple(text) for text in changed}) == len(mutants)


def test_a_mutant_is_exchanged_and_restored() -> None:
    function = function_of(CLIP)
    mutant = next(
        mutant
        for mutant in mutants_of(CLIP, definition_of(function))
        if mutant.change.endswith("limit * (norm + 1e-06)")
    )
    healthy = function(8.0, 2.0)
    with exchanged(function, compiled(function, mutant.build())):
        assert function(8.0, 2.0) != healthy
    assert function(8.0, 2.0) == healthy


def test_there_are_enough() -> None:
    """A package of the core alone has hundreds, each of which compiles."""
    names = [name for name in modules() if name.startswith("optimizer.")]
    mutants = []
    for name in names:
        for target, function in functions(name).items():
            mutants += [(function, mutant) for mutant in mutants_of(target, definition_of(function))]
    assert len(mutants) > 400
    assert min(Counter(mutant.kind for _, mutant in mutants).values()) > 0
    for function, mutant in mutants[::20]:
        assert compiled(function, mutant.build()) != function.__code__


def verdict(name: str, outcome: str, **fields: object) -> Verdict:
    return Verdict(f"optimizer.clip:{name}", "constant", "1  ->  2", 1, outcome, **fields)  # type: ignore[arg-type]


def test_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last verdict counts; the table ends before the first mutant that not all judges have judged."""
    entries = [{"function": "same", "reason": "equal"}, {"function": "text", "kind": "message", "reason": "a name"}]
    monkeypatch.setitem(REASONS, "optimizer.clip", entries)
    verdicts = [
        verdict("a#0", FOUND, by="llama", symptom="exception X"),
        verdict("b#0", SURVIVED),
        verdict("same#0", SURVIVED),
        verdict("text#0", SURVIVED),
        verdict("c#0", NOT_EXECUTED, final=True),
        verdict("d#0", SURVIVED),
        verdict("e#0", FOUND, by="llama"),
        verdict("b#0", FOUND, by="tests/optimizer/test_clip.py::test", final=True),
    ]
    outcomes = [FOUND, FOUND, EQUIVALENT, NO_NUMBER, NOT_EXECUTED, SURVIVED, FOUND]
    assert [item.outcome for item in latest(verdicts)] == outcomes
    assert len(judged_by_all(verdicts)) == 5
    text = summary(verdicts)
    assert "| optimizer | 5 | 2 | 1 | 1 | 0 | 1 | 0 | 66.7 % |" in text
    assert "no number, message: 1" in text
    assert "found by exception while training: 1" in text and "found by other tests: 1" in text


def test_entries_name_functions_kinds_and_reasons() -> None:
    for module, entries in REASONS.items():
        names = [name.partition(":")[2] for name in functions(module)]
        for entry in entries:
            assert fnmatch.filter(names, entry["function"]), entry
            assert entry["reason"]
            assert entry.get("kind", "gpu") in ("gpu", *KINDS), entry
