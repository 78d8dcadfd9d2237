"""Metrics files: valid JSON, appended, and read back without repeated steps."""

from __future__ import annotations

import json
import math

import pytest

from megatron_core.errors import DataError
from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.reports.metrics import read_metrics
from tests.monitor.examples import step, validation


def write(path, *events) -> None:
    sink = JsonLinesSink(path)
    for event in events:
        sink.on_validation(event) if not hasattr(event, "learning_rate") else sink.on_step(event)
    sink.close()


def iterations(path) -> list[tuple[str, int]]:
    return [(record["kind"], record["iteration"]) for record in read_metrics(path)]


def test_every_event_is_a_line_of_its_own_at_once(tmp_path):
    path = tmp_path / "new" / "metrics.jsonl"
    sink = JsonLinesSink(path)
    sink.on_step(step(1))
    first = json.loads(path.read_text())  # before close
    assert first["kind"] == "step" and first["loss"] == 4.809311 and first["layout"] == "1 process"
    sink.on_validation(validation(1))
    sink.close()
    record = json.loads(path.read_text().splitlines()[1])
    assert record["kind"] == "validation" and record["perplexity"] == pytest.approx(102.98, abs=0.01)


def test_numbers_that_json_lacks_are_null_and_named(tmp_path):  # C47
    path = tmp_path / "m.jsonl"
    write(path, step(1, loss=math.nan, grad_norm=math.inf), validation(1, loss=math.nan))

    def refuse(text):
        raise AssertionError(text)

    lines = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert lines[0]["loss"] is None and lines[0]["non_finite"] == {"loss": "nan", "grad_norm": "inf"}
    back = read_metrics(path)
    assert math.isnan(back[0]["loss"]) and back[0]["grad_norm"] == math.inf and math.isnan(back[1]["loss"])
    assert "non_finite" not in back[0]


def test_a_resumed_run_appends_and_its_steps_replace_those_of_the_lost_one(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, step(1), step(2, loss=1.0), validation(2), step(3, loss=1.0), validation(3))
    write(path, step(2, loss=2.0), validation(2, loss=5.0))
    assert len(path.read_text().splitlines()) == 7
    assert iterations(path) == [("step", 1), ("step", 2), ("validation", 2)]
    assert [record["loss"] for record in read_metrics(path)] == [4.809311, 2.0, 5.0]


def test_what_came_before_the_checkpoint_stays(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, step(1), step(2), validation(2), validation(2, split="test"), step(3))
    write(path, step(3), step(4))
    kinds = [("step", 1), ("step", 2), ("validation", 2), ("validation", 2), ("step", 3), ("step", 4)]
    assert iterations(path) == kinds


def test_a_line_torn_by_a_kill_costs_that_line_alone(tmp_path):
    path = tmp_path / "m.jsonl"
    write(path, step(1), step(2))
    path.write_text(path.read_text()[:-30])
    write(path, step(2), step(3))
    assert iterations(path) == [("step", 1), ("step", 2), ("step", 3)]


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nothing\.jsonl"):
        read_metrics(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    "line",
    [
        '{"kind": "step"}',
        '{"kind": "step", "iteration": "x", "loss": 1}',
        '{"kind": "validation", "iteration": 1, "loss": [1]}',
        '{"kind": "step", "iteration": 2, "loss": null, "non_finite": {"loss": "x"}}',
    ],
)
def test_a_record_of_wrong_types_is_named(line, tmp_path):
    """Other lines, such as truncated or endlessly nested ones, are not records."""
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"kind": "st\n' + "[" * 100_000 + '\n{"a": ' + "9" * 5000 + "}\n" + line + "\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 4 is not a record of a run: missing or out of range: "):
        read_metrics(path)
