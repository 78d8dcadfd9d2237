"""Lion under DeepSpeed's names."""

from deepspeed.ops.lion.lion import DeepSpeedCPULion as DeepSpeedCPULion
from deepspeed.ops.lion.lion import FusedLion as FusedLion
