"""Gradient buffers and gradient reduction over data-parallel ranks."""

from megatron_core.data_parallel.buffer import Bucket, Initialise
from megatron_core.data_parallel.wrapper import DataParallel
