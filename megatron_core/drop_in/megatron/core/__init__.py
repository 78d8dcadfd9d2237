"""Names of ``megatron.core``."""

import megatron_core.drop_in  # finds the modules of named_modules.yaml
from megatron.core import num_microbatches_calculator, parallel_state, tensor_parallel, timers, utils
from megatron.core import parallel_state as mpu
from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.inference.contexts.dynamic_context import StaticInferenceContext as InferenceParams
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.package_info import __version__
from megatron.core.timers import Timers
