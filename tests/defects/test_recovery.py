"""Planted defects of recoveries: a disturbed simulated job with another end, or a test, finds each."""

from __future__ import annotations

from functools import partial

import pytest

from tests.defects.in_recovery import IN_RECOVERY
from tests.defects.plant import planted
from tests.end_to_end.recovery_simulated import CASES, differences, undisturbed
from tests.memory import needs_proc

pytestmark = needs_proc
BY_NAME = {defect.name: defect for defect in IN_RECOVERY}


@pytest.mark.parametrize("name", BY_NAME)
def test_every_defect_is_found(name: str, record_property) -> None:
    defect = BY_NAME[name]
    if isinstance(defect.check, partial) and defect.check.args[0] in CASES:
        undisturbed(defect.check.args[0])  # before anything is planted
    with planted(defect.target, defect.patch), pytest.raises(Exception):  # noqa: B017
        defect.check()


@pytest.mark.parametrize("name", BY_NAME)
def test_every_defect_can_be_planted(name: str) -> None:
    """``make test`` runs a sample of the defects, so that a changed source would otherwise not be noticed."""
    with planted(BY_NAME[name].target, BY_NAME[name].patch):
        pass


@pytest.mark.whole_matrix
@pytest.mark.parametrize("check", dict.fromkeys(defect.check for defect in IN_RECOVERY))
def test_checks_hold_without_defects(check) -> None:
    check()
    assert differences(undisturbed("dp2 zero3"), undisturbed("dp2 zero3")) == []
