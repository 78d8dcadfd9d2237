"""Frozen configuration: built once, checked once, then only read."""

from megatron_core.config.checkpoint import CheckpointConfig
from megatron_core.config.data import DataConfig
from megatron_core.config.model import ModelConfig
from megatron_core.config.monitor import MonitorConfig
from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.training import OptimizerConfig, TrainingConfig
