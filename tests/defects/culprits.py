"""Score ``verify.culprit`` on the planted defects: ``python -m tests.defects.culprits``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cache, partial

from megatron_core.config import RunConfig
from megatron_core.verify import RankFailure, Trace, assemble
from megatron_core.verify.bounds import Bounds, relative_errors
from megatron_core.verify.culprit import Reference, describe_culprit, first_step
from megatron_core.verify.gpt import compare_step, record_step, train_traced
from megatron_core.verify.ranks import Simulated, run_ranks, run_simulated
from tests.defects.defect import Defect
from tests.defects.defects import DEFECTS
from tests.defects.in_worlds import IN_WORLDS, WorldDefect
from tests.defects.plant import planted
from tests.defects.test_worlds import healthy
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
    config = RunConfig.from_flat(BASE | model | layout)
    return _answer(
        defect,
        baseline_of(BASE | model),
        partial(reference_of, defect.row),
        partial(run_simulated, world_size, train_traced, config, 3, finish=assemble),
        partial(run_simulated, world_size, compare_step, config),
    )


def answer_in_world(defect: WorldDefect) -> str:
    """The sentence about the defect in its large layout, or the failure of this layout."""
    experiment, layout, baseline = healthy(defect.large, tuple(defect.flags.items()))
    return _answer(
        defect,
        baseline,
        lambda step: run_ranks(1, experiment.record, step)[0],
        partial(run_simulated, layout.world_size, experiment, layout, "float64", finish=assemble),
        partial(run_simulated, layout.world_size, experiment.compare, layout),
    )


def _answer(
    defect: Defect | WorldDefect,
    baseline: Trace,
    record: Callable[[int], Reference],
    trace: Callable[[], Simulated],
    compare: Callable[..., Simulated],
) -> str:
    """Run ``trace()`` and ``compare(reference, step)`` with the defect; one process is computed without it."""
    bounds = Bounds("float64")
    try:
        with planted(defect.target, defect.patch):
            errors = relative_errors(trace().result, baseline)
        wrong = {name: error for name, error in errors.items() if not error <= bounds.of(name)}
        step = first_step(wrong)
        reference = record(step)
        with planted(defect.target, defect.patch):
            return describe_culprit(reference, compare(reference, step).result, wrong)
    except RankFailure as failure:
        return str(failure).strip().splitlines()[-1]


def is_right(defect: Defect | WorldDefect, text: str) -> bool:
    """Whether an answer names the place where the defect was planted."""
    return any(fnmatchcase(text.removeprefix("first wrong: "), f"{part}*") for part in defect.culprit.split(" or "))


def main() -> int:
    """Print all wrong answers and the score; return 0 if enough are right."""
    questions = [(defect, defect.row, partial(answer, defect)) for defect in DEFECTS]
    questions += [(defect, defect.large, partial(answer_in_world, defect)) for defect in IN_WORLDS]
    right = 0
    for defect, where, ask in questions:
        text = ask()
        if is_right(defect, text):
            right += 1
        else:
            print(
                f"{defect.name} ({where})",
                f"planted in {defect.target}",
                f"expected: {defect.culprit}",
                text,
                sep="\n  ",
            )
    print(f"right place: {right} of {len(questions)} planted defects")
    return 0 if right >= SHARE * len(questions) else 1


if __name__ == "__main__":
    sys.exit(main())
