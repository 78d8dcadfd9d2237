"""Adam under DeepSpeed's names."""

from deepspeed.ops.adam.adam import DeepSpeedCPUAdam as DeepSpeedCPUAdam
from deepspeed.ops.adam.adam import FusedAdam as FusedAdam
