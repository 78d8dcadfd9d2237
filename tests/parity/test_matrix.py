"""The parity matrix: every layout computes what one process computes.

Each row trains the same tiny model for three steps on the same ragged global batches and compares loss, gradient norm,
every gradient of every step and the weights with one process. Dropout is on, because its masks do not depend on the
layout.
"""

from __future__ import annotations

import numpy as np
import pytest

from megatron_core.config import RunConfig
from megatron_core.verify import trace_training
from megatron_core.verify.bounds import FLOAT64_BOUND, Bounds, beyond, relative_errors
from megatron_core.verify.trace import Trace
from tests.parity.every_row import FAST_ROW, drawn
from tests.parity.rows import BASE, ROWS, TP2, TP4, baseline_of, compare, noise_of

FAST = pytest.mark.fast


def faults(found: Trace, baseline: Trace, bounds: Bounds) -> list[str]:
    """The reason why a row fails."""
    return [*found.faults, *beyond(relative_errors(found, baseline), bounds)]


# C1 C2 C3 C5 C6 C7 C8 C11 C13 C14 C15 C17 C18 C20 C21 C22 C27 C33 C35 C36 C51: every row compares the affected
# quantities.
@pytest.mark.every_case
@pytest.mark.parametrize("row", [pytest.param(row, marks=FAST if row == FAST_ROW else ()) for row in drawn(ROWS)])
def test_layout_computes_what_one_process_computes(row: str) -> None:
    found, baseline = compare(*ROWS[row])
    assert faults(found, baseline, Bounds("float64")) == []


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
