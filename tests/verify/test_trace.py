"""Combined traces of ranks."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn

from megatron_core.verify.trace import RankTrace, assemble


def rank_trace(*parts: tuple[slice, list[float]], loss: float = 1.0) -> RankTrace:
    """A rank that holds rows of one tensor of four."""
    return RankTrace([loss], [2.0], [("weight.a", (4,), (rows,), np.array(values)) for rows, values in parts])


def test_parts_make_the_whole() -> None:
    trace = assemble([rank_trace((slice(0, 1), [1.0]), (slice(3, 4), [4.0])), rank_trace((slice(1, 3), [2.0, 3.0]))])
    assert trace.faults == []
    assert (trace.losses, trace.norms) == ([1.0], [2.0])
    np.testing.assert_array_equal(trace.tensors["weight.a"], [1.0, 2.0, 3.0, 4.0])


def test_copies_must_be_equal_to_the_bit() -> None:
    whole = rank_trace((slice(0, 4), [1.0, 2.0, 3.0, 4.0]))
    assert assemble([whole, rank_trace((slice(1, 2), [2.0]))]).faults == []
    other = rank_trace((slice(1, 2), [np.nextafter(2.0, 3.0)]))
    assert assemble([whole, other]).faults == ["ranks hold different copies of weight.a"]


def test_equal_nans_are_equal_copies() -> None:
    """NaN is allowed here; the comparison detects it."""
    assert assemble([rank_trace((slice(0, 4), [np.nan] * 4)), rank_trace((slice(0, 4), [np.nan] * 4))]).faults == []


def test_missing_elements_are_a_fault() -> None:
    assert assemble([rank_trace((slice(0, 3), [1.0, 2.0, 3.0]))]).faults == ["no rank holds some elements of weight.a"]


def test_ranks_must_report_one_loss() -> None:
    whole = (slice(0, 4), [0.0] * 4)
    assert assemble([rank_trace(whole), rank_trace(whole, loss=1.5)]).faults == [
        "rank 1 reports a different loss from rank 0"
    ]


def test_a_tensor_without_dimensions() -> None:
    trace = assemble([RankTrace([], [], [("weight.scale", (), (), np.array(3.0))])])
    assert trace.faults == []
    assert trace.tensors["weight.scale"] == 3.0


class Updated:
    """As ``DataParallel``, of which only this method is called."""

    def reading(self, parameters: list[nn.Parameter]) -> list[nn.Parameter]:
        """The parameters themselves."""
        return parameters


def test_ranks_share_the_memory_of_equal_copies() -> None:
    def weights(*values: float) -> RankTrace:
        layer = nn.Linear(len(values), 1, bias=False)
        nn.init.zeros_(layer.weight).data[0] = torch.tensor(values)
        trace = RankTrace()
        trace.add_weights(Updated(), [layer])  # type: ignore[arg-type]
        return trace

    first, equal, other = weights(1.0, 2.0), weights(1.0, 2.0), weights(1.0, 3.0)
    assert equal.pieces[0][3] is first.pieces[0][3]
    assert other.pieces[0][3].tolist() == [[1.0, 3.0]]
    assert assemble([first, equal, other]).faults == ["ranks hold different copies of weight.weight"]
