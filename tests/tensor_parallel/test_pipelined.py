"""Products of parallel layers that are pipelined with their communication: equal bits, and what is hidden.

Computation takes a known time: each product pauses in proportion to its rows. Messages arrive over a simulated link of
known speed (``SlowLink``), so that the time that could be hidden is known; only waiting for the link counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.slow_link import SlowLink
from megatron_core import parallel_state
from megatron_core.parallel import Grid, ParallelGroups
from megatron_core.reports.meter import METER
from megatron_core.tensor_parallel import ColumnParallelLinear, ModelParallelConfig, RowParallelLinear, linear_comm
from megatron_core.verify.ranks import run_ranks, this_world
from tests.defects.plant import planted

S, B, WIDTH, CHUNKS = 16, 2, 8, 4
PAUSE = 0.02
"""Seconds of a product of all rows."""
SHARE = 0.4
"""Part of the pause that the messages of a product take: half a product hides them, if the sequence is split in two."""
KINDS = ("all_reduce", "ring")
LAYERS = {"column": ColumnParallelLinear, "row": RowParallelLinear}
PASSES = [
    ("row", False, "forward"),
    ("row", True, "forward"),
    ("row", True, "backward"),
    ("column", True, "forward"),
    ("column", False, "backward"),
    ("column", True, "backward"),
]
"""(layer, whether the sequence is split, pass): the products with communication of their own."""


def _run(kind: str, sequence_parallel: bool, overlap: bool, read: Callable[[], Any]) -> tuple[list[Any], list[Tensor]]:
    """Forward and backward; ``read()`` before, between and after them, and output and gradients."""
    config = ModelParallelConfig(
        sequence_parallel=sequence_parallel, tp_comm_overlap=overlap, tp_comm_overlap_chunks=CHUNKS
    )
    torch.manual_seed(this_world().rank)
    layer = LAYERS[kind](WIDTH, WIDTH, bias=False, config=config)
    splits = sequence_parallel and kind == "column", kind == "row"
    x = torch.randn(S // 2 if splits[0] else S, B, WIDTH // 2 if splits[1] else WIDTH, requires_grad=True)
    marks = [read()]
    y, _ = layer(x)
    marks.append(read())
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(7)))
    marks.append(read())
    return marks, [y.detach(), x.grad, layer.weight.grad]


def _slow_linear_into(out: Tensor, *given: Any, product: Any = linear_comm.linear_into) -> None:
    time.sleep(PAUSE * len(out) / S)
    product(out, *given)


def _bytes() -> float:
    return sum(one.bytes for name, one in METER.take().traffic.items() if name.split()[1] in KINDS)


def _hidden(kind: str, sequence_parallel: bool, direction: str, overlap: bool) -> list[float]:
    """The hidden parts of three measurements, in ascending order."""
    METER.start(ParallelGroups(Grid(tp=2), this_world().rank), torch.device("cpu"))
    sent = _run(kind, sequence_parallel, overlap, _bytes)[0][1 if direction == "forward" else 2]
    found = []
    link = SlowLink(KINDS, sent / (SHARE * PAUSE))
    with pytest.MonkeyPatch.context() as patch, link.installed():
        patch.setattr(linear_comm, "linear_into", _slow_linear_into)
        for _ in range(3):
            marks, _ = _run(kind, sequence_parallel, overlap, lambda: (link.delayed, link.exposed))
            before, after = marks[:2] if direction == "forward" else marks[1:]
            found.append(1.0 - (after[1] - before[1]) / (after[0] - before[0]))
    METER.stop()
    return sorted(found)


def _all_hidden(overlap: bool) -> list[list[float]]:
    parallel_state.initialize_model_parallel(2)
    return [_hidden(*each, overlap) for each in PASSES]


def test_communication_is_hidden_behind_products() -> None:
    """One of three measurements counts: noise of the machine hides more without overlap, and less with it."""
    on, off = (run_ranks(2, _all_hidden, overlap) for overlap in (True, False))
    for with_overlap, without in zip(on, off, strict=True):
        for case, found, in_turn in zip(PASSES, with_overlap, without, strict=True):
            assert found[-1] >= 0.6 and in_turn[0] < 0.5, (case, found, in_turn)


def test_finds_communication_that_is_not_hidden() -> None:
    with planted("tensor_parallel.linear_comm:_overlapped", "if comm.overlap:", "if not comm.overlap:"):
        for parts in run_ranks(2, _all_hidden, True):
            assert all(found[0] < 0.6 for found in parts), parts


def _results() -> None:
    parallel_state.initialize_model_parallel(2)
    for kind in LAYERS:
        for sequence_parallel in (False, True):
            on, off = (_run(kind, sequence_parallel, overlap, lambda: None)[1] for overlap in (True, False))
            assert all(torch.equal(a, b) for a, b in zip(on, off, strict=True)), (kind, sequence_parallel)


def test_overlap_changes_no_bit() -> None:
    run_ranks(2, _results)
