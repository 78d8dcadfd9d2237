"""Runs every operation once, forward and backward, on the GPU: what compute-sanitizer is let loose on.

compute-sanitizer --tool memcheck --error-exitcode 1 python -m tests.ops.run_all
"""

from __future__ import annotations

import sys

import torch

from benchmarks.bench_ops import as_tuple
from benchmarks.op_cases import CASES
from tests.ops.checks import LOW

# In packs of 16 bytes and held in registers, too long for that, and in single elements.
SHAPES = ((37, 256), (6, 65536), (9, 128 * 3))


def main() -> int:
    """Run them; 1 where there is no GPU."""
    if not torch.cuda.is_available():
        print("tests.ops.run_all needs a GPU, and torch sees none")
        return 1
    torch.set_default_device("cuda")
    for op, case in CASES.items():
        for dtype in LOW:
            for rows, columns in SHAPES:
                inputs = case.inputs(rows, columns, dtype)
                outputs = as_tuple(case.function(*inputs, backend="native"))
                wanted = [tensor for tensor in inputs if tensor.requires_grad]
                torch.autograd.grad(outputs, wanted, [torch.randn_like(y) for y in outputs])
        torch.cuda.synchronize()
        print(op, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
