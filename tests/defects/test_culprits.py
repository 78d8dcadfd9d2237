"""``verify.culprit`` names the tensor at which a defect was planted; ``tests.defects.culprits`` asks it about all."""

from __future__ import annotations

import pytest

from tests.defects.culprits import answer, is_right
from tests.defects.defects import DEFECTS
from tests.defects.in_worlds import IN_WORLDS

BY_NAME = {defect.name: defect for defect in DEFECTS}
SAMPLE = (  # one for each kind of answer
    "dropout is keyed by the number of the layer on its stage",  # an output
    "gradient of a scattered output is divided by the ranks",  # a gradient of an output
    "query and key norm gradients are summed with sequence parallel only",  # a gradient of a parameter
    "unsharded gradients count once for each data-parallel rank in the norm",
    "weights are gathered before they are updated",
    "data-parallel ranks read the same samples",
    "last step's gradients stay in the buffers",  # right in the first step
)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("name", SAMPLE)
def test_the_culprit_of_a_planted_defect_is_named(name: str) -> None:
    defect = BY_NAME[name]
    text = answer(defect)
    assert is_right(defect, text), text


def test_every_defect_has_a_culprit() -> None:
    assert [defect.name for defect in (*DEFECTS, *IN_WORLDS) if not defect.culprit] == []
