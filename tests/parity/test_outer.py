"""Groups of replicas compute in every layout what one process computes for them, one after the other."""

from __future__ import annotations

import pytest

from megatron_core.verify.bounds import Bounds
from tests.parity.every_row import drawn
from tests.parity.outer_rows import OUTER_ROWS
from tests.parity.rows import compare
from tests.parity.test_matrix import faults


@pytest.mark.drawn(3)
@pytest.mark.parametrize("row", drawn(OUTER_ROWS))
def test_layout_computes_what_one_process_computes(row: str) -> None:
    found, baseline = compare(*OUTER_ROWS[row])
    assert any("all groups" in name for name in baseline.tensors)
    assert faults(found, baseline, Bounds("float64")) == []
