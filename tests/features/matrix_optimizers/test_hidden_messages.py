"""Messages of Muon are hidden behind the orthogonalization of other matrices, measured over a link of known speed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from benchmarks.bench_overlap import matrices_in_turn
from benchmarks.slow_link import SimulatedClock, SlowLink
from megatron_core.features.matrix_optimizers.muon import Muon
from megatron_core.reports.meter import METER
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

MODEL = {"num_layers": 6, "optimizer": "muon", "tensor_model_parallel_size": 2, "global_batch_size": 2}
CLOCK = SimulatedClock()
PAUSE, BANDWIDTH = 0.012, 2.3e6
"""Seconds of a matrix, and bytes per second. A rank has 3 of the 6 matrices of each of 4 rounds, and sends 18 kB of
their parts, which take 8 ms, in each direction."""


def hidden(in_turn: bool) -> tuple[float, list[float]]:
    """The hidden part of the delays of two steps, and the losses."""
    torch.set_num_threads(1)
    transform = Muon.transform

    def slow(self: Muon, *args: Any) -> torch.Tensor:
        CLOCK.sleep(PAUSE)
        return transform(self, *args)

    run, losses = tiny_run(**MODEL), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Muon, "transform", slow)
        METER.start(run.groups, run.world.device)
        with SlowLink(["all_to_all"], BANDWIDTH, CLOCK).installed() as link:
            for _ in range(2):
                if in_turn:
                    with matrices_in_turn():
                        losses.append(train_step(run).loss)
                else:
                    losses.append(train_step(run).loss)
        METER.stop()
    assert link.delayed > 8 * 2 * 0.007, "each step sends 4 rounds in both directions"
    return 1 - link.exposed / link.delayed, losses


def test_orthogonalization_hides_at_least_60_percent() -> None:
    """Of 8 messages of a step only the last cannot be hidden, and the first only behind the update of vectors."""
    off, on = (run_ranks(2, hidden, in_turn) for in_turn in (True, False))
    for (hidden_off, losses_off), (hidden_on, losses_on) in zip(off, on, strict=True):
        assert hidden_off < 0.3 and hidden_on > 0.6
        assert losses_off == losses_on
