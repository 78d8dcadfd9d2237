"""Rows of settings drawn at random, against one process (see ``drawn_rows``)."""

from __future__ import annotations

import pytest

from tests.parity.drawn_rows import compared, described
from tests.sample import WHOLE_MATRIX


@pytest.mark.drawn(2)
@pytest.mark.parametrize("number", range(3000, 3200) if WHOLE_MATRIX else (1035, 1073, 2079))
def test_a_drawn_row_computes_what_one_process_computes(number: int) -> None:
    found = compared(number)
    assert found == [], described(number)
