"""When ``--cpu`` takes effect: after the import of torch, in a program and in the interpreters that it starts."""

import os

from megatron_core.drop_in.after_import import run_after_import
from megatron_core.launcher import read_integer

DEVICES = "MEGATRON_DROP_IN_CPU"
"""Environment variable, set by ``--cpu``: the number of devices that ``torch.cuda`` describes; empty: one for each rank
of this machine."""


def emulate_cuda_if_requested() -> None:
    """Let requests for GPUs resolve to the CPU if ``DEVICES`` is set, now or as soon as torch is imported."""
    if DEVICES in os.environ:
        run_after_import("torch", _emulate_cuda)


def _emulate_cuda() -> None:
    from megatron_core.drop_in.cpu_mode import emulate_cuda

    ranks = read_integer("LOCAL_WORLD_SIZE", 1, least=1)
    emulate_cuda(read_integer(DEVICES, 1, least=1) if os.environ[DEVICES] else ranks)
