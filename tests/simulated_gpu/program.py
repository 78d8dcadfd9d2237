"""``pretrain_gpt.py`` on simulated GPUs, whose groups are those of gloo under the name of NCCL.

python -m tests.simulated_gpu.program FLAGS...   # one process for each rank, with torchrun's variables

``HANGING_ABORT=RANK:NUMBER``: on that rank this abort of a process's communicators, counted from 1, does not return.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_core.resilience import gpu_groups
from tests.simulated_gpu.runtime import simulated_gpu

PROGRAM = Path(__file__).parents[2] / "pretrain_gpt.py"


def main() -> None:
    """Run the program with the flags of this one."""
    join, abort = dist.init_process_group, dist.distributed_c10d._abort_process_group
    aborts = count(1)

    def with_gloo(backend: str, **settings: Any) -> None:
        assert backend == "nccl", f"{backend} on GPUs"
        join("gloo", **settings)

    def aborted(*groups: Any) -> None:
        abort_of_rank = f"{os.environ['RANK']}:{next(aborts)}"
        print(f"simulated GPU: abort {abort_of_rank}", file=sys.stderr, flush=True)
        if os.environ.get("HANGING_ABORT") == abort_of_rank:
            time.sleep(3600)
        abort(*groups)

    dist.init_process_group, dist.distributed_c10d._abort_process_group = with_gloo, aborted
    gpu_groups.ABORT_SECONDS = 3.0
    sys.argv[0] = str(PROGRAM)
    with simulated_gpu():
        runpy.run_path(str(PROGRAM), run_name="__main__")


if __name__ == "__main__":
    main()
