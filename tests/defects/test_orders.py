"""Planted changes of the order of a sum: the comparison to the bit finds each."""

from __future__ import annotations

import pytest

from tests.defects.in_orders import IN_ORDERS
from tests.defects.plant import planted
from tests.parity.invariant_rows import FLOAT32, differences

BY_NAME = {defect.name: defect for defect in IN_ORDERS}


@pytest.mark.whole_matrix
@pytest.mark.parametrize("name", BY_NAME)
def test_bits_differ(name: str) -> None:
    defect = BY_NAME[name]
    assert differences(defect.row, FLOAT32, planted(defect.target, defect.patch)) != []


@pytest.mark.parametrize("name", BY_NAME)
def test_every_change_can_be_planted(name: str) -> None:
    with planted(BY_NAME[name].target, BY_NAME[name].patch):
        pass
