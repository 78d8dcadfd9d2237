"""Recovery on GPUs: NCCL's communicators are aborted, or the process is replaced.

None of this has run on a GPU yet; tests use the simulated one.
"""

import os
import sys
from typing import NoReturn

import torch
import torch.distributed as dist

from megatron_core.errors import LayoutError, visible
from megatron_core.parallel import World
from megatron_core.parallel.exit_status import RESTART
from megatron_core.parallel.time_limit import within

ABORT_SECONDS = 10.0
"""Time limit of aborting all communicators and waiting for the device."""


def prepare_gpu(world: World) -> None:
    """Prepare the training process of a rank with a GPU, which has just been forked; ``LayoutError`` if CUDA was used
    before."""
    if world.device.type != "cuda":
        return
    if torch.cuda._is_in_bad_fork():
        raise LayoutError(
            "recover=in-process: CUDA was used before the training process was forked, so that it cannot use the GPU; "
            "set PYTORCH_NVML_BASED_CUDA_CHECK=1, and do not use torch.cuda before training"
        )
    # torch must not end the process for a collective that fails: this is what recovery is for.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"
    if world.rank == 0:
        print("note: recover=in-process has not been tested on GPUs yet", file=sys.stderr, flush=True)


def obstacle_to_reuse(device: torch.device) -> str | None:
    """Abort all communicators of a GPU and wait for it; the reason why this process cannot use it again, or None."""
    if device.type != "cuda":
        return None

    def release() -> str | None:
        try:
            if dist.is_initialized():
                # All within one group of NCCL, so that aborts of different communicators do not wait for each other.
                dist.distributed_c10d._abort_process_group()
            # A kernel that failed has left an error that every later call returns.
            torch.cuda.synchronize(device)
        except (RuntimeError, ValueError, AssertionError) as error:
            return f"the GPU or its communicators are not usable: {str(error).splitlines()[0][:200]}"
        return None

    late: str | None = f"aborting NCCL's communicators did not end within {ABORT_SECONDS:g} s"
    return within(ABORT_SECONDS, release, late)


def replace_process(prefix: str, reason: str) -> NoReturn:
    """End this training process; its supervisor starts another one, which loads the copies of the state."""
    print(f"{prefix} note: {visible(reason)}".lstrip(), file=sys.stderr, flush=True)
    os._exit(RESTART)
