"""Count the defects that a narrower dtype does not reveal: ``python -m tests.defects.measure bfloat16``.

The baseline is one process in float64; bounds come from rounding errors of one process in the dtype.
"""

from __future__ import annotations

import sys
from functools import cache

from megatron_core.config import RunConfig
from megatron_core.verify import Trace, trace_training
from megatron_core.verify.bounds import Bounds
from tests.defects.defects import DEFECTS
from tests.defects.judge import judged
from tests.parity.every_row import EVERY_ROW
from tests.parity.rows import BASE, baseline_of, noise_of
from tests.parity.test_matrix import faults


def main(dtype: str) -> None:
    # Otherwise elements whose true gradient is 0 (key biases) change by rounding only; ``verify.shrink`` also sets it.
    calm = {"adam_eps": 1e-3}
    narrow = {"fp64": False, "bf16": dtype == "bfloat16"}

    @cache
    def reference(row: str) -> tuple[Trace, Bounds]:
        """The baseline of a row and its rounding errors, both computed before anything is planted."""
        world_size, model, layout = EVERY_ROW[row]
        baseline = baseline_of(BASE | model | calm)
        bounds = Bounds(dtype, noise_of(BASE | model | calm, narrow))
        healthy = trace_training(RunConfig.from_flat(BASE | model | calm | narrow | layout), world_size)
        if found := faults(healthy, baseline, bounds):
            print(f"{row} does not hold even without a defect: {found[0]}", flush=True)
        return baseline, bounds

    caught = 0
    for defect in DEFECTS:
        baseline, bounds = reference(defect.row)
        if judged(defect, baseline, bounds, calm | narrow):
            caught += 1
        else:
            print(f"{defect.name} escapes", flush=True)
    print(f"{dtype}: {caught} of {len(DEFECTS)} caught")


if __name__ == "__main__":
    main(sys.argv[1])
