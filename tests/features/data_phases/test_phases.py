"""Blends one after another, and errors about their file."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_core.errors import ConfigError
from tests.datasets.files import write_counting
from tests.datasets.test_build_datasets import build_datasets


def test_phases_go_on_where_a_file_was(tmp_path: Path) -> None:
    a, b = write_counting(tmp_path / "a", [801]), write_counting(tmp_path / "b", [801], start=5000)
    (tmp_path / "phases.yaml").write_text(
        f"- {{samples: 30, data_path: [0.5, {a}, 0.5, {b}]}}\n- {{samples: 20, data_path: [{a}]}}\n"
        f"- {{data_path: [0.75, {b}, 0.25, {a}]}}\n"
    )
    splits = build_datasets(data_phases=str(tmp_path / "phases.yaml"), sequence_length=8, seed=3, split="1")
    alone = {name: build_datasets(data_path=[name], sequence_length=8, seed=3, split="1").train for name in (a, b)}
    place, seen = {a: 0, b: 0}, []
    for i in range(150):
        tokens = splits.train[i]["tokens"].tolist()
        name = a if tokens[0] < 5000 else b
        assert tokens == alone[name][place[name]]["tokens"].tolist(), i  # C30: each file in its own order
        place[name] += 1
        seen.append(name)
    shares = [seen[:30].count(a) / 30, seen[30:50].count(a) / 20, seen[50:].count(a) / 100]
    assert shares == pytest.approx([0.5, 1.0, 0.25], abs=0.04)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        ("{a: 1", "is not YAML"),
        ("a: 1", "contains a dict; expected a list"),
        ("[{data_path: [a]}, {data_path: [b]}]", "phase 1 has samples=None; give an integer"),
        ("[{data_path: [a], samples: 0}, {data_path: [b]}]", "phase 1 has samples=0"),
        ("[{data_path: [a], samples: 5}]", "phase 1, the last, has samples=5; remove it"),
        ("[{data: [a]}]", "phase 1 is .*; expected {samples: N, data_path"),
    ],
)
def test_files_of_phases_that_are_misformed(content: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "given").write_text(content)
    with pytest.raises(ConfigError, match=sentence):
        build_datasets(data_phases=str(tmp_path / "given"), sequence_length=8, seed=3)
