"""The plain model finds planted defects that are the same in every layout."""

from __future__ import annotations

import pytest

from tests.defects.plant import planted
from tests.plain.defects import DEFECTS, OF_GROUPS, OF_LOSS_SCALE
from tests.plain.rows import ROWS
from tests.plain.test_groups import test_groups as compare_groups
from tests.plain.test_rows import wrong


@pytest.mark.drawn(10)
@pytest.mark.parametrize("name", DEFECTS)
def test_finds(name: str) -> None:
    target, patch, row = DEFECTS[name]
    with planted(target, patch):
        assert wrong(ROWS[row], steps=2), f"the row {row!r} holds in spite of it"


@pytest.mark.parametrize("name", OF_LOSS_SCALE)
def test_finds_with_loss_scale(name: str) -> None:
    target, patch, row = OF_LOSS_SCALE[name]
    with planted(target, patch):
        assert wrong(ROWS[row], steps=2) == [], f"the row {row!r} finds it without a loss scale"
        assert wrong(ROWS[row], steps=2, loss_scale=1024.0)


@pytest.mark.parametrize("name", OF_GROUPS)
def test_finds_in_large_layouts(name: str) -> None:
    target, patch, row = OF_GROUPS[name]
    with planted(target, patch), pytest.raises(AssertionError):
        compare_groups(row)
    compare_groups(row)


def test_every_defect_can_be_planted() -> None:
    """``make test`` runs a sample of the defects, so that a changed source would otherwise not be noticed."""
    for target, patch, _ in (DEFECTS | OF_LOSS_SCALE | OF_GROUPS).values():
        with planted(target, patch):
            pass
