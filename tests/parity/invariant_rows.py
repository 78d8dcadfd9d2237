"""The rows of the parity matrix that ``--layout-invariant`` supports, and their comparison to the bit."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache

import numpy as np

from megatron_core.config import RunConfig
from megatron_core.config.validate import problems
from megatron_core.verify import Trace, trace_training
from tests.parity.context_rows import CONTEXT_ROWS
from tests.parity.every_row import EVERY_ROW
from tests.parity.moe_rows import MOE_ROWS
from tests.parity.rows import BASE, ROWS
from tests.sample import WHOLE_MATRIX

INVARIANT = {"fp64": False, "layout_invariant": True}
STEPS = 3
FLOAT32, BFLOAT16 = {"bf16": False}, {"bf16": True}


def config_of(model: dict, layout: dict, dtype: dict) -> RunConfig:
    """The configuration of a row."""
    return RunConfig.from_flat(BASE | model | INVARIANT | dtype | layout)


def refusal(row: str) -> str | None:
    """The reason why the row's model or layout is refused; None if it is supported."""
    world_size, model, layout = EVERY_ROW[row]
    return next(problems(config_of(model, layout, FLOAT32), world_size), None)


CANDIDATES = (*ROWS, *CONTEXT_ROWS, *MOE_ROWS)
# Every worker imports this module, and the check of all 487 rows takes it two seconds.
SUPPORTED = [row for row in (CANDIDATES if WHOLE_MATRIX else CANDIDATES[20::40]) if refusal(row) is None]
"""The supported rows of the whole matrix; without WHOLE_MATRIX=1 those among one of 40, of which two are drawn."""


def differences(row: str, dtype: dict, change: AbstractContextManager[object] | None = None) -> list[str]:
    """The quantities that differ in a bit between the row's layout, with ``change``, and one process without it."""
    world_size, model, layout = EVERY_ROW[row]
    expected = _alone(tuple(sorted(model.items())), dtype["bf16"])
    with change or nullcontext():
        found = trace_training(config_of(model, layout, dtype), world_size, STEPS)
    return differing(found, expected)


def differing(found: Trace, expected: Trace) -> list[str]:
    """The quantities of two traces that differ in a bit."""
    pairs = (("losses", found.losses, expected.losses), ("norms", found.norms, expected.norms))
    names = [name for name, a, b in pairs if a != b]
    names += [name for name in expected.tensors if not np.array_equal(found.tensors[name], expected.tensors[name])]
    return [*found.faults, *names]


@cache
def _alone(model: tuple[tuple[str, object], ...], bf16: bool) -> Trace:
    return trace_training(config_of(dict(model), {}, {"bf16": bf16}), 1, STEPS)
