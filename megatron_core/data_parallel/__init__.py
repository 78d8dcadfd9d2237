"""Gradient buffers and gradient reduction over data-parallel ranks."""

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.data_parallel.memory import BucketMemory, Initialise
from megatron_core.data_parallel.settings import DataParallelSettings
from megatron_core.data_parallel.wrapper import DataParallel
