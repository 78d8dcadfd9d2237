"""Stages of ZeRO."""

from enum import IntEnum

from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum as OffloadDeviceEnum


class ZeroStageEnum(IntEnum):
    """Values of ``zero_optimization.stage``."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3
