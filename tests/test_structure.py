"""The measures of the structure stay within their limits, and find what they look for."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.structure import imports, style
from tests.structure.measures import MEASURES, Measure
from tests.structure.parts import part_of


@pytest.mark.parametrize("measure", MEASURES, ids=lambda measure: measure.name)
def test_a_measure_is_within_its_limit(measure: Measure) -> None:
    value = measure.compute()
    assert measure.holds(value), f"{measure.name}: {value:,.6g}, limit {measure.limit:,.6g}"


def test_features_are_not_the_core() -> None:
    assert part_of("features.qk_clip.clip") == "feature qk_clip"
    assert part_of("training.loop") == "core"
    assert part_of("hub.hugging_face.reader") == "hub"


def test_imports_are_followed_as_python_loads_them() -> None:
    loaded = imports.loaded_by("transformer.block")
    assert {"transformer", "transformer.attention", "config.model"} <= loaded
    assert "training.loop" not in loaded


@pytest.mark.parametrize(
    ("measure", "code", "expected"),
    [
        (style.vague_names, "found = 1\nlosses = 2", 0.5),
        (style.double_assignments, "a, b = 1, 2\nc, d = f()", 1),
        (style.nested_conditional_expressions, "a = 1 if b else (2 if c else 3)", 1),
        (style.comment_share, "# reason\na = 1  # not a line of its own", 0.5),
    ],
)
def test_measures_of_style(measure, code: str, expected: float, tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(code)
    assert measure([path]) == expected


def test_long_docstrings_and_parameters_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "code.py"
    path.write_text(f'def f():\n    """{"word " * 101}"""\n')
    assert style.long_docstrings([path]) == ["code.py: f"]
    assert style.number_of_parameters("training.callbacks", "is_due") == 2
    assert isinstance(imports.tree(path), ast.Module)
