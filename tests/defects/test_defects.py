"""Planted defects: the proof can fail.

That the rows hold without a defect is what ``tests/parity/test_matrix.py`` shows.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.defects.defect import Defect
from tests.defects.defects import DEFECTS
from tests.defects.judge import first_sign, symptoms
from tests.parity.every_row import EVERY_ROW


@pytest.mark.parametrize("defect", DEFECTS, ids=[defect.name for defect in DEFECTS])
def test_parity_matrix_finds(defect: Defect, record_property: Callable[[str, object], None]) -> None:
    record_property("defect", defect.name)
    found = symptoms(defect)
    assert found, f"the row {defect.row!r} holds in spite of it"
    record_property("given away by", first_sign(found))


def test_table() -> None:
    assert len(DEFECTS) >= 25
    assert len({defect.name for defect in DEFECTS}) == len(DEFECTS)
    assert len({(defect.target, defect.old, defect.new) for defect in DEFECTS}) == len(DEFECTS)
    assert {defect.row for defect in DEFECTS} <= EVERY_ROW.keys()
