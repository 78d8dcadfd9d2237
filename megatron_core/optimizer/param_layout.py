"""For Megatron Core's users: where parameters lie in flat buffers."""

from megatron_core.data_parallel.param_layout import (
    BufferKey,
    FullParamLayout,
    PerBufferParamLayout,
    bucket_end_divisor,
    pad_bucket_end,
    pad_param_start,
    pad_to_divisor,
)

__all__ = [
    "BufferKey",
    "FullParamLayout",
    "PerBufferParamLayout",
    "bucket_end_divisor",
    "pad_bucket_end",
    "pad_param_start",
    "pad_to_divisor",
]
