"""Offload in the JSON."""

from enum import Enum
from pathlib import Path
from typing import Annotated

from pydantic import Field

from deepspeed.runtime.config_utils import DeepSpeedConfigModel


class OffloadDeviceEnum(str, Enum):
    """Values of ``device``."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


class OffloadStateTypeEnum(str, Enum):
    """Parts of an engine's state."""

    optim_states = "optim_states"
    hp_params = "hp_params"
    lp_params = "lp_params"
    lp_grads = "lp_grads"
    contiguous_grad_buffer = "contiguous_grad_buffer"


class DeepSpeedZeroOffloadParamConfig(DeepSpeedConfigModel):
    """The section ``offload_param``."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: Annotated[int, Field(ge=0)] = 5
    buffer_size: Annotated[int, Field(ge=0)] = 100_000_000
    max_in_cpu: Annotated[int, Field(ge=0)] = 1_000_000_000
    pin_memory: bool = True


class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """The section ``offload_optimizer``."""

    device: OffloadDeviceEnum = OffloadDeviceEnum.none
    nvme_path: Path | None = None
    buffer_count: Annotated[int, Field(ge=0)] = 4
    pin_memory: bool = True
    pipeline_read: bool = False
    pipeline_write: bool = False
    fast_init: bool = False
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0
    super_offload: bool = False
    cpuadam_cores_perc: Annotated[float, Field(ge=0, le=1)] = 0.8

    @property
    def pipeline(self) -> bool:
        """Whether one of the two pipelines is asked for."""
        return self.pipeline_read or self.pipeline_write
