"""The layout of parameters in flat buffers."""

from megatron.core.distributed.param_layout import (
    BufferKey,
    FullParamLayout,
    PerBufferParamLayout,
    bucket_end_divisor,
    pad_bucket_end,
    pad_param_start,
    pad_to_divisor,
)
