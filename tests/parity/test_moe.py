"""More rows with experts for the whole matrix, and that all of them are legal settings."""

from __future__ import annotations

import os

import pytest

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.verify.compare import Bounds
from tests.parity.moe_rows import MOE_ROWS, MORE_MOE_ROWS
from tests.parity.rows import BASE, compare
from tests.parity.test_matrix import faults

ROWS = MOE_ROWS | MORE_MOE_ROWS
DRAWN = "experts, dp2 pp2 ep2 zb_h1 zero1"
"""The one of ``MORE_MOE_ROWS`` that is a part of the default run."""


# C5 C6 C7 C8 C15 C51: what they would change is compared in every row.
@pytest.mark.parametrize("row", MORE_MOE_ROWS if os.environ.get("WHOLE_MATRIX") == "1" else [DRAWN])
def test_layout_of_experts_computes_what_one_process_computes(row: str) -> None:
    found, baseline = compare(*MORE_MOE_ROWS[row])
    assert faults(found, baseline, Bounds("float64")) == []


@pytest.mark.parametrize("row", ROWS)
def test_row_can_be_trained(row: str) -> None:
    world_size, model, layout = ROWS[row]
    assert list(problems(RunConfig.from_flat(BASE | model | layout), world_size)) == []
