"""README's table of measured steps is that of benchmarks/results.csv."""

from __future__ import annotations

from pathlib import Path

from benchmarks.peer_table import CONTENDERS, latest, records, table

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_readme_has_the_latest_measurements() -> None:
    lines = list(table(records()))
    assert len(lines) == len(CONTENDERS) + 2
    assert "\n".join(lines) in README, "python -m benchmarks.peer_table prints README's table"


def test_the_latest_measurement_of_a_figure_and_machine_is_kept() -> None:
    def record(contender: str, value: str, machine: str = "a") -> dict[str, str]:
        return {"benchmark": "b", "contender": contender, "unit": "s", "machine": machine, "value": value}

    measured = [record("x", "1"), record("y", "2"), record("x", "3"), record("x", "4", machine="b")]
    assert [row["value"] for row in latest(measured)] == ["2", "3", "4"]
