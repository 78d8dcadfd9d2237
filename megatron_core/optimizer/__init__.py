"""Optimizers, loss scaling and learning-rate schedules."""

from megatron_core.optimizer.algorithms import register_optimizer
from megatron_core.optimizer.rule import Algorithm, Rates, ShardSlice, write_copy
