"""QK-clip computes in every layout what it computes in one process."""

from __future__ import annotations

import pytest

from megatron_core.verify.compare import Bounds
from tests.parity.clip_rows import CLIP_ROWS
from tests.parity.every_row import drawn
from tests.parity.rows import compare
from tests.parity.test_matrix import faults


@pytest.mark.drawn(2)
@pytest.mark.parametrize("row", drawn(CLIP_ROWS))
def test_layout_computes_what_one_process_computes(row: str) -> None:
    found, baseline = compare(*CLIP_ROWS[row])
    assert faults(found, baseline, Bounds("float64")) == []
