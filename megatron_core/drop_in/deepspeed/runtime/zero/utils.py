"""Parameters of ZeRO 3, and the error of DeepSpeed's ZeRO."""

from deepspeed.runtime.zero.partition_parameters import is_zero_param as is_zero_param
from megatron_core.errors import ConfigError as ZeRORuntimeException

__all__ = ["ZeRORuntimeException", "is_zero_param"]
