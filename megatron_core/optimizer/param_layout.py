"""For Megatron Core's users: where parameters lie in flat buffers."""

from megatron_core.data_parallel.param_layout import (
    BufferKey as BufferKey,
)
from megatron_core.data_parallel.param_layout import (
    FullParamLayout as FullParamLayout,
)
from megatron_core.data_parallel.param_layout import (
    PerBufferParamLayout as PerBufferParamLayout,
)
from megatron_core.data_parallel.param_layout import (
    bucket_end_divisor as bucket_end_divisor,
)
from megatron_core.data_parallel.param_layout import (
    pad_bucket_end as pad_bucket_end,
)
from megatron_core.data_parallel.param_layout import (
    pad_param_start as pad_param_start,
)
from megatron_core.data_parallel.param_layout import (
    pad_to_divisor as pad_to_divisor,
)
