"""The parity matrix: every layout computes what one process computes.

Each row trains the same tiny model for three steps on the same ragged global batches and compares loss, gradient norm,
every gradient of every step and the weights with one process. Dropout is on, because its masks do not depend on the
layout.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_core.config import RunConfig
from megatron_core.verify import assemble, trace_training
from megatron_core.verify.bounds import FLOAT64_BOUND, Bounds, beyond, relative_errors
from megatron_core.verify.gpt import train_traced
from megatron_core.verify.ranks import run_simulated
from megatron_core.verify.trace import Trace
from tests.parity.every_row import FAST_ROW, drawn
from tests.parity.rows import BASE, ROWS, TP2, TP4, baseline_of, compare, noise_of
from tests.sample import WHOLE_MATRIX

FAST = pytest.mark.fast
SHARE = 8


def is_of_transport(setting: str) -> bool:
    """Whether it changes how ranks exchange data."""
    return "overlap" in setting or setting == "distributed_backend"


# Threads take a third less processor time than processes, which fork, and copy what they exchange. Rows that differ in
# their transport need processes; others compute the same in both.
SIMULATED = frozenset(
    row
    for number, row in enumerate(drawn(ROWS))
    if not WHOLE_MATRIX and number % SHARE and not any(map(is_of_transport, ROWS[row][2])) and ROWS[row][0] in (2, 4)
)
"""Rows of ``make test`` with simulated ranks: of those with the usual transport all but one of ``SHARE``."""


def faults(found: Trace, baseline: Trace, bounds: Bounds) -> list[str]:
    """The reason why a row fails."""
    return [*found.faults, *beyond(relative_errors(found, baseline), bounds)]


# C1 C2 C3 C5 C6 C7 C8 C11 C13 C14 C15 C17 C18 C20 C21 C22 C27 C33 C35 C36 C51: every row compares the affected
# quantities.
@pytest.mark.every_case
@pytest.mark.parametrize("row", [pytest.param(row, marks=FAST if row == FAST_ROW else ()) for row in drawn(ROWS)])
def test_layout_computes_what_one_process_computes(row: str) -> None:
    world_size, model, layout = ROWS[row]
    config = RunConfig.from_flat(BASE | model | layout)
    if row in SIMULATED:
        found = run_simulated(world_size, train_traced, config, 3, finish=assemble).result
    else:
        found = trace_training(config, world_size)
    assert faults(found, baseline_of(BASE | model), Bounds("float64")) == []


def test_rows_in_processes() -> None:
    """They have every number of ranks, both back ends, and every switch of overlap."""
    rows = [ROWS[row] for row in drawn(ROWS) if row not in SIMULATED]
    assert {ranks for ranks, _, _ in rows} == {ranks for ranks, _, _ in ROWS.values()}
    settings = {name for _, _, layout in rows for name in layout}
    assert settings >= {name for _, _, layout in ROWS.values() for name in layout if is_of_transport(name)}


@pytest.mark.drawn(1)
@pytest.mark.parametrize("row", ["tp4 sp", "pp4", "dp2 zero1", "dp2 tp2 pp2 sp zero1 x 2 chunks", "1 group, tp4"])
def test_layout_in_float32(row: str) -> None:
    """No quantity is much further from float64 than in one process in float32: ``megatron_core.verify.bounds``."""
    world_size, model, layout = ROWS[row]
    found = trace_training(RunConfig.from_flat(BASE | model | {"fp64": False} | layout), world_size)
    bounds = Bounds("float32", noise_of(BASE | model, {}))
    assert faults(found, baseline_of(BASE | model), bounds) == []


@pytest.mark.parametrize("vocabulary", [50257])
@pytest.mark.parametrize("layout", [TP2, TP4], ids=["tp2", "tp4"])
def test_vocabulary_of_gpt2(vocabulary: int, layout: dict) -> None:  # C21
    """50257 is not divisible by any size of a layout."""
    model = {
        "vocab_size": vocabulary,
        "num_layers": 1,
        "make_vocab_size_divisible_by": 128,
        "global_batch_size": 2,
    }
    found, baseline = compare(layout["tensor_model_parallel_size"], model, layout)
    assert max(relative_errors(found, baseline).values()) < FLOAT64_BOUND


def test_truth_is_not_trivial() -> None:
    """With tiny gradients or constant weights in the baseline, the matrix would be meaningless. # C52"""
    baseline = baseline_of(BASE)
    assert baseline.losses[2] != baseline.losses[0]
    assert min(baseline.norms) > BASE["clip_grad"]
    for name, values in baseline.tensors.items():
        assert np.abs(values).max() > 1e-6, f"{name} is all but zero"
