"""Planted defects: the comparison can fail.

``tests/parity/test_matrix.py`` shows that the rows pass without a defect.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.defects.defects import DEFECTS
from tests.defects.judge import first_sign, symptoms
from tests.parity.every_row import EVERY_ROW, cover
from tests.sample import WHOLE_MATRIX

BY_NAME = {defect.name: defect for defect in DEFECTS}
SHOWS = {name: {defect.target.partition(".")[0], *defect.bug_class.split()} for name, defect in BY_NAME.items()}
"""In the default run, a defect represents those of its package and of its classes."""
SAMPLE = cover(SHOWS, lambda name: 1 + EVERY_ROW[BY_NAME[name].row][0])


@pytest.mark.every_case
@pytest.mark.parametrize("name", [name for name in BY_NAME if WHOLE_MATRIX or name in SAMPLE])
def test_parity_matrix_finds(name: str, record_property: Callable[[str, object], None]) -> None:
    defect = BY_NAME[name]
    record_property("defect", name)
    found = symptoms(defect)
    assert found, f"the row {defect.row!r} holds in spite of it"
    record_property("given away by", first_sign(found))


def test_table() -> None:
    assert len(DEFECTS) >= 25
    assert len(BY_NAME) == len(DEFECTS)
    assert len({(defect.target, defect.patch) for defect in DEFECTS}) == len(DEFECTS)
    assert {defect.row for defect in DEFECTS} <= EVERY_ROW.keys()


def test_every_package_and_class_has_a_defect_in_the_sample() -> None:
    assert set().union(*(SHOWS[name] for name in SAMPLE)) == set().union(*SHOWS.values())
