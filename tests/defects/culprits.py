"""Score ``verify.culprit`` on the planted defects: ``python -m tests.defects.culprits``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.verify import RankFailure, assemble
from megatron_core.verify.compare import Bounds, relative_errors
from megatron_core.verify.culprit import Reference, describe, first_step
from megatron_core.verify.gpt import compare_step, record_step, train_traced
from megatron_core.verify.ranks import run_ranks, run_simulated
from tests.defects.defect import Defect
from tests.defects.defects import DEFECTS
from tests.defects.plant import planted
from tests.parity.every_row import EVERY_ROW
from tests.parity.rows import BASE, baseline_of

SHARE = 0.9
"""Smallest share of right answers."""


@cache
def reference_of(row: str, step: int) -> Reference:
    """The tensors of a step of the row's model in one process."""
    (reference,) = run_ranks(1, record_step, RunConfig.from_flat(BASE | EVERY_ROW[row][1]), step)
    return reference


def answer(defect: Defect) -> str:
    """The sentence of ``verify.culprit`` about the defect in its row."""
    world_size, model, layout = EVERY_ROW[defect.row]
    baseline = baseline_of(BASE | model)  # before anything is planted
    config, bounds = RunConfig.from_flat(BASE | model | layout), Bounds("float64")

    def simulate(function: Callable[..., object], *args: object, **named: Any) -> Any:
        with planted(defect.target, defect.old, defect.new):
            return run_simulated(world_size, function, config, *args, **named).result

    try:
        errors = relative_errors(simulate(train_traced, 3, finish=assemble), baseline)
        wrong = {name: error for name, error in errors.items() if not error <= bounds.of(name)}
        step = first_step(wrong)
        reference = reference_of(defect.row, step)
        return describe(reference, simulate(compare_step, reference, step), wrong)
    except RankFailure as failure:
        return str(failure).strip().splitlines()[-1]


def is_right(defect: Defect, text: str) -> bool:
    """Whether an answer names the place where the defect was planted."""
    return any(fnmatchcase(text.removeprefix("first wrong: "), f"{part}*") for part in defect.culprit.split(" or "))


def main() -> int:
    """Print all wrong answers and the score; return 0 if enough are right."""
    right = 0
    for defect in DEFECTS:
        text = answer(defect)
        if is_right(defect, text):
            right += 1
        else:
            print(
                f"{defect.name} ({defect.row})\n  planted in {defect.target}\n  expected: {defect.culprit}\n  {text}",
                flush=True,
            )
    print(f"right module: {right} of {len(DEFECTS)} planted defects")
    return 0 if right >= SHARE * len(DEFECTS) else 1


if __name__ == "__main__":
    sys.exit(main())
