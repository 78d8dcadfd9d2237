"""Layouts in FP8 compute what one process computes in FP8."""

from __future__ import annotations

import pytest

from megatron_core.verify.bounds import Bounds, relative_errors
from tests.parity.every_row import drawn
from tests.parity.fp8_rows import FP8_ROWS
from tests.parity.rows import BASE, UNTIED, baseline_of, compare, noise_of
from tests.parity.test_matrix import faults
from tests.sample import WHOLE_MATRIX

CALM = {"adam_eps": 1e-3}  # otherwise elements whose true gradient is 0 change by rounding only
RECIPES = ["tensorwise, tp2 sp", "delayed, tp2", "rowwise, tp2", "blockwise, tp2", "mxfp8, tp2"]


@pytest.mark.drawn(3)
@pytest.mark.parametrize("row", drawn(FP8_ROWS))
def test_layout_computes_what_one_process_computes(row: str) -> None:  # C49
    found, baseline = compare(*FP8_ROWS[row])
    assert faults(found, baseline, Bounds("float64")) == []


def test_recipes_are_not_one_another() -> None:
    """Rows would also pass if FP8 were not used: check that gradients differ from float64's by percents, differently
    per recipe."""
    model = {name: value for name, value in (BASE | FP8_ROWS[RECIPES[-1]][1]).items() if not name.startswith("fp8")}
    exact = baseline_of(model)
    found = {row: baseline_of(model | FP8_ROWS[row][1]) for row in RECIPES[3:]}
    for row, trace in found.items():
        errors = [
            value
            for name, value in relative_errors(trace, exact).items()
            if name.startswith("grad0") and "fc1.weight" in name
        ]
        assert errors and all(1e-3 < error < 0.5 for error in errors), row
    assert len({trace.losses[2] for trace in found.values()}) == len(found)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("row", ["rowwise, pp2 zb_h1", "blockwise, pp2", "tensorwise, pp2", "delayed, pp2 zb_h1"])
def test_a_pipeline_changes_no_bit_in_bf16(row: str) -> None:
    """The order of its sums is that of one process, except for a tied embedding's."""
    size, model, layout = FP8_ROWS[row]
    found, baseline = compare(size, model | UNTIED, layout, {"fp64": False, "bf16": True})
    assert found.faults == [] and found.losses == baseline.losses
    assert [name for name, values in baseline.tensors.items() if (found.tensors[name] != values).any()] == []


@pytest.mark.parametrize("row", RECIPES if WHOLE_MATRIX else RECIPES[:1])
def test_layout_in_bf16(row: str) -> None:
    """No quantity is much further from float64 than in one process in bfloat16 with FP8."""
    size, model, layout = FP8_ROWS[row]
    narrow = {"fp64": False, "bf16": True}
    found, _ = compare(size, model, layout, narrow | CALM)
    bounds = Bounds("bfloat16", noise_of(BASE | model | CALM, narrow))
    assert faults(found, baseline_of(BASE | model | CALM), bounds) == []
