"""Layouts in FP8 compute what one process computes in FP8."""

from __future__ import annotations

import pytest

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.verify.compare import Bounds, relative_errors
from tests.ops.checks import WHOLE_MATRIX
from tests.parity.fp8_rows import FP8_ROWS, MORE_FP8_ROWS
from tests.parity.rows import BASE, baseline_of, compare
from tests.parity.test_matrix import faults

ROWS = FP8_ROWS | MORE_FP8_ROWS
RECIPES = ["tensorwise, tp2 sp", "delayed, tp2", "rowwise, tp2", "blockwise, tp2", "mxfp8, tp2"]


@pytest.mark.parametrize("row", ROWS if WHOLE_MATRIX else FP8_ROWS)
def test_layout_computes_what_one_process_computes(row: str) -> None:  # C49
    found, baseline = compare(*ROWS[row])
    assert faults(found, baseline, Bounds("float64")) == []


@pytest.mark.parametrize("row", ROWS)
def test_row_can_be_trained(row: str) -> None:
    world_size, model, layout = ROWS[row]
    assert list(problems(RunConfig.from_flat(BASE | model | layout), world_size)) == []


def test_recipes_are_not_one_another() -> None:
    """Were FP8 not used, every row would hold: gradients are off by percents, each recipe's by others."""
    model = {name: value for name, value in (BASE | ROWS[RECIPES[-1]][1]).items() if not name.startswith("fp8")}
    exact = baseline_of(model)
    found = {row: baseline_of(model | ROWS[row][1]) for row in RECIPES[3:]}
    for row, trace in found.items():
        errors = [
            value
            for name, value in relative_errors(trace, exact).items()
            if name.startswith("grad0") and "fc1.weight" in name
        ]
        assert errors and all(1e-3 < error < 0.5 for error in errors), row
    assert len({trace.losses[2] for trace in found.values()}) == len(found)
