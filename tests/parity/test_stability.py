"""QK-clip, z-loss, SOAP and AdaMuon compute in every layout what they compute in one process."""

from __future__ import annotations

import pytest

from megatron_core.verify.bounds import Bounds
from tests.parity.every_row import drawn
from tests.parity.rows import compare
from tests.parity.stability_rows import STABILITY_ROWS
from tests.parity.test_matrix import faults


@pytest.mark.drawn(2)
@pytest.mark.parametrize("row", drawn(STABILITY_ROWS))
def test_layout_computes_what_one_process_computes(row: str) -> None:
    found, baseline = compare(*STABILITY_ROWS[row])
    assert faults(found, baseline, Bounds("float64")) == []
