"""Low-rank adapters compute in every layout what they compute in one process."""

from __future__ import annotations

import pytest

from megatron_core.verify.bounds import Bounds
from tests.parity.every_row import drawn
from tests.parity.lora_rows import LORA_ROWS
from tests.parity.rows import compare
from tests.parity.test_matrix import faults


@pytest.mark.drawn(2)
@pytest.mark.parametrize("row", drawn(LORA_ROWS))
def test_layout_computes_what_one_process_computes(row: str) -> None:
    found, baseline = compare(*LORA_ROWS[row])
    assert faults(found, baseline, Bounds("float64")) == []
