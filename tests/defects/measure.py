"""How many of the defects a narrower dtype would let through: ``python -m tests.defects.measure bfloat16``.

The truth is one process in float64, the bounds come from the rounding of one process in the dtype.
"""

from __future__ import annotations

import sys
from functools import cache

from megatron_core.config import RunConfig
from megatron_core.verify import Trace, trace_training
from megatron_core.verify.compare import Bounds, relative_errors
from tests.defects.defects import DEFECTS
from tests.defects.judge import judged
from tests.parity.rows import BASE, ROWS, truth_of
from tests.parity.test_matrix import faults

# Elements whose true gradient is 0 must not be moved by rounding alone: ``test_layout_in_float32``.
CALM = {"adam_eps": 1e-3}


def main(dtype: str) -> None:
    narrow = CALM | {"fp64": False, "bf16": dtype == "bfloat16"}

    @cache
    def reference(row: str) -> tuple[Trace, Bounds]:
        """The truth of a row and how far from it rounding leads; both before anything is planted."""
        world_size, model, layout = ROWS[row]
        truth = truth_of(BASE | model | CALM)
        bounds = Bounds(dtype, relative_errors(truth_of(BASE | model | narrow), truth))
        healthy = trace_training(RunConfig.from_flat(BASE | model | narrow | layout), world_size)
        if found := faults(healthy, truth, bounds):
            print(f"{row} does not hold even without a defect: {found[0]}", flush=True)
        return truth, bounds

    caught = 0
    for defect in DEFECTS:
        truth, bounds = reference(defect.row)
        if judged(defect, truth, bounds, narrow):
            caught += 1
        else:
            print(f"{defect.name} escapes", flush=True)
    print(f"{dtype}: {caught} of {len(DEFECTS)} caught")


if __name__ == "__main__":
    main(sys.argv[1])
