"""Records of hashes: written and read, resumed runs, and the first difference in the order of a step."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from megatron_core.errors import DataError
from megatron_core.reports.hash_records import HashRecord, HashWriter, first_hash_difference, hash_file, read_hashes
from tests.programs import run_program

compare = partial(run_program, "tools/compare_hashes.py")


def record(iteration: int, **changes: object) -> HashRecord:
    tensors = {"gradients": {"b.weight": "1", "a.weight": "2"}, "weights": {"a.weight": "3", "b.weight": "4"}}
    made = HashRecord(
        iteration=iteration, loss=2.5, grad_norm=0.1, gradients="g", optimizer="o", weights="w", by_tensor=tensors
    )
    return replace(made, **changes)


def write(folder: Path, records: list[HashRecord]) -> Path:
    writer = HashWriter(hash_file(folder / "metrics.jsonl"), {"layout": "tp2"})
    for each in records:
        writer.write(each, hash_seconds=0.1, step_seconds=1.0)
    writer.close()
    return folder


def test_what_is_written_is_read(tmp_path: Path) -> None:
    records = [HashRecord(iteration=0, weights="w", optimizer="o"), record(1), record(2, loss=float("nan"))]
    records[2] = replace(records[2], differing_copies=["weights: a"])
    found = read_hashes(write(tmp_path, records))
    assert repr(found) == repr(records)  # NaN is unequal to itself
    assert read_hashes(tmp_path / "metrics.jsonl")[1] == read_hashes(tmp_path / "metrics.hashes.jsonl")[1] == records[1]


def test_a_resumed_run_replaces_later_records(tmp_path: Path) -> None:
    """The state that it has loaded replaces the state after the step of the first run."""
    write(tmp_path, [record(1), record(2), record(3)])
    write(tmp_path, [HashRecord(iteration=2, weights="loaded", optimizer="o"), record(3, loss=9.0)])
    found = read_hashes(tmp_path)
    assert [each.iteration for each in found] == [1, 2, 3]
    assert (found[1].loss, found[1].weights, found[2].loss) == (2.5, "loaded", 9.0)


def test_first_difference_is_in_the_order_of_the_step() -> None:
    one = [record(1), record(2), record(3)]
    assert first_hash_difference(one, one) is None
    tensors = {"gradients": {"b.weight": "1", "a.weight": "X"}, "weights": {"a.weight": "Y", "b.weight": "Y"}}
    later = [record(1), record(2, gradients="G", weights="W", by_tensor=tensors), record(3, loss=0.0)]
    found = first_hash_difference(one, later)
    assert found is not None
    assert (found.iteration, found.quantity, found.tensor, found.module) == (2, "gradients", "a.weight", "a")
    assert (found.differing, found.tensors) == (1, 2)
    assert "gradient of a.weight differs first" in str(found)
    both = [record(1, loss=2.5000000000000004, gradients="G", by_tensor={})]
    assert str(first_hash_difference(one, both)) == "iteration 1: the loss differs first"
    only_weights = first_hash_difference(one, [record(1, weights="W", by_tensor={})])
    assert only_weights is not None and (only_weights.quantity, only_weights.tensor) == ("weights", None)


def test_iterations_that_one_run_lacks_are_not_compared() -> None:
    assert first_hash_difference([record(1), record(2)], [record(2)]) is None


def test_the_tool_names_the_difference(tmp_path: Path) -> None:
    one = write(tmp_path / "one", [record(1), record(2)])
    tensors = {"gradients": {"b.weight": "X", "a.weight": "2"}}
    other = write(tmp_path / "other", [record(1), record(2, gradients="G", by_tensor=tensors)])
    same = compare(one, one)
    assert (same.returncode, "equal: all hashes of 2 iterations, 1 to 2" in same.stdout) == (0, True)
    found = compare(one, other)
    assert found.returncode == 1
    assert "iteration 2: the gradient of b.weight differs first, in the module b; 1 of 2" in found.stdout
    assert "equal before: iterations 1 to 1" in found.stdout


def test_the_tool_names_copies_that_differ(tmp_path: Path) -> None:
    one = write(tmp_path, [record(1), record(2, differing_copies=("weights: a.weight",))])
    found = compare(one, one)
    assert found.returncode == 1 and "iteration 2: copies on several ranks differ: weights: a.weight" in found.stdout


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"kind": "hashes", "iteration": "x"}, "line 2 is not a record of hashes: missing or wrong: iteration"),
        ({"kind": "start", "version": 9}, "has records of version 9; this program reads version 1"),
        ({"kind": "other"}, "has no record of hashes; train with --record-hashes"),
    ],
)
def test_bad_records_are_one_sentence(tmp_path: Path, line: dict, message: str) -> None:
    path = hash_file(tmp_path / "metrics.jsonl")
    path.write_text(json.dumps({"kind": "start", "version": 1}) + "\n" + json.dumps(line) + "\n")
    with pytest.raises(DataError, match=message):
        read_hashes(path)


def test_runs_without_common_records_are_refused(tmp_path: Path) -> None:
    found = compare(write(tmp_path / "one", [record(1)]), write(tmp_path / "other", [record(2)]))
    assert found.returncode == 1 and "no common iteration (iterations 1 to 1; iterations 2 to 2)" in found.stderr
    assert "has no records of hashes" in compare(tmp_path, tmp_path).stderr
