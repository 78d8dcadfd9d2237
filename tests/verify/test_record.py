"""Records of ranks put together."""

from __future__ import annotations

import numpy as np

from megatron_core.verify.record import Record, assemble


def record(*parts: tuple[slice, list[float]], loss: float = 1.0) -> Record:
    """A rank that holds rows of one tensor of four."""
    return Record([loss], [2.0], [("weight.a", (4,), (rows,), np.array(values)) for rows, values in parts])


def test_parts_make_the_whole() -> None:
    trace = assemble([record((slice(0, 1), [1.0]), (slice(3, 4), [4.0])), record((slice(1, 3), [2.0, 3.0]))])
    assert trace.faults == []
    assert (trace.losses, trace.norms) == ([1.0], [2.0])
    np.testing.assert_array_equal(trace.tensors["weight.a"], [1.0, 2.0, 3.0, 4.0])


def test_copies_must_be_equal_to_the_bit() -> None:
    whole = record((slice(0, 4), [1.0, 2.0, 3.0, 4.0]))
    assert assemble([whole, record((slice(1, 2), [2.0]))]).faults == []
    other = record((slice(1, 2), [np.nextafter(2.0, 3.0)]))
    assert assemble([whole, other]).faults == ["ranks hold different copies of weight.a"]


def test_equal_nans_are_equal_copies() -> None:
    """That they are NaN is the comparison's business."""
    assert assemble([record((slice(0, 4), [np.nan] * 4)), record((slice(0, 4), [np.nan] * 4))]).faults == []


def test_missing_elements_are_a_fault() -> None:
    assert assemble([record((slice(0, 3), [1.0, 2.0, 3.0]))]).faults == ["nobody holds some elements of weight.a"]


def test_ranks_must_report_one_loss() -> None:
    whole = (slice(0, 4), [0.0] * 4)
    assert assemble([record(whole), record(whole, loss=1.5)]).faults == ["rank 1 reports another loss than rank 0"]


def test_a_tensor_without_dimensions() -> None:
    trace = assemble([Record([], [], [("weight.scale", (), (), np.array(3.0))])])
    assert trace.faults == []
    assert trace.tensors["weight.scale"] == 3.0
