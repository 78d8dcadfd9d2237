"""Optimizers, loss scaling and learning-rate schedules."""

from megatron_core.optimizer.algorithms import Algorithm, Rates, ShardSlice, register_optimizer, write_copy
