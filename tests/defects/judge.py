"""Train a row of the parity matrix with a defect, and judge it like the matrix."""

from __future__ import annotations

import re
from math import isfinite

from megatron_core.config import RunConfig
from megatron_core.verify import RankFailure, Trace, trace_training
from megatron_core.verify.bounds import Bounds
from tests.defects.defect import Defect
from tests.defects.plant import planted
from tests.parity.every_row import EVERY_ROW
from tests.parity.rows import BASE, baseline_of
from tests.parity.test_matrix import faults

INCOMPLETE = "do not make up one whole model"
"""The message of ``models.build`` about missing or duplicate layers, before the first step."""


def symptoms(defect: Defect) -> list[str]:
    """The matrix's judgement of the defect's row."""
    # Computed before anything is planted, because one process must remain the baseline.
    baseline = baseline_of(BASE | EVERY_ROW[defect.row][1])
    return judged(defect, baseline, Bounds("float64"))


def judged(defect: Defect, baseline: Trace, bounds: Bounds, extra: dict | None = None) -> list[str]:
    """Faults of the defect's row under ``bounds``; ``extra`` settings may narrow its dtype."""
    try:
        found = train(defect, extra)
    except RankFailure as failure:
        if INCOMPLETE not in str(failure):
            raise
        return [f"rank 0 refuses to start: {INCOMPLETE}"]
    assert all(map(isfinite, found.losses)), "a loss that is not finite needs no parity matrix"
    return faults(found, baseline, bounds)


def first_sign(found: list[str]) -> str:
    """The symptom of the earliest step, the largest of that step."""
    return min(found, key=_step_of)


def _step_of(symptom: str) -> int:
    """Differences between ranks (``rank 1 reports ...``) come first and weights, compared at the end, last."""
    named = re.search(r"\b(?:loss|norm|grad)(\d)", symptom)
    if named:
        return int(named[1])
    return 0 if symptom.startswith("rank") else 9


def train(defect: Defect, extra: dict | None = None) -> Trace:
    """The trace of the defect's row with the defect."""
    world_size, model, layout = EVERY_ROW[defect.row]
    with planted(defect.target, defect.patch):
        return trace_training(RunConfig.from_flat(BASE | model | (extra or {}) | layout), world_size)
