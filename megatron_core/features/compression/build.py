"""Builds the compressors of a run, each with its update rule."""

from megatron_core.config import RunConfig
from megatron_core.features.compression.blocks import BlockMessages
from megatron_core.features.compression.powersgd import PowerSGD
from megatron_core.features.compression.settings import CompressionConfig
from megatron_core.features.compression.signs import OneBitAdam, OneBitLAMB, ZeroOneAdam, ZeroOnePolicy
from megatron_core.features.compression.updates import OneBitAdamUpdate, OneBitLAMBUpdate, ZeroOneAdamUpdate


def build_blocks(config: RunConfig) -> BlockMessages:
    """The compressor of --grad-compression int4-gradients, int8-weights, and both."""
    name = config.parallel.grad_compression
    return BlockMessages(gradients="int4-gradients" in name, weights="int8-weights" in name)


def build_powersgd(config: RunConfig) -> PowerSGD:
    """The compressor of --grad-compression powersgd."""
    settings = config.section(CompressionConfig)
    return PowerSGD(settings.powersgd_rank, settings.grad_compression_warmup_iters)


def build_onebit_adam(config: RunConfig) -> OneBitAdam:
    """The compressor of --grad-compression onebit-adam."""
    settings = config.section(CompressionConfig)
    compressor = OneBitAdam(config.optimizer.adam_beta1, settings.grad_compression_warmup_iters)
    compressor.update_rule = lambda rule, groups: OneBitAdamUpdate(rule.config, groups, compressor)
    return compressor


def build_onebit_lamb(config: RunConfig) -> OneBitLAMB:
    """The compressor of --grad-compression onebit-lamb."""
    settings = config.section(CompressionConfig)
    compressor = OneBitLAMB(config.optimizer.adam_beta1, settings.grad_compression_warmup_iters)
    compressor.update_rule = lambda rule, groups: OneBitLAMBUpdate(rule.config, groups, compressor, settings)
    return compressor


def build_zero_one_adam(config: RunConfig) -> ZeroOneAdam:
    """The compressor of --grad-compression zero-one-adam."""
    settings = config.section(CompressionConfig)
    policy = ZeroOnePolicy(
        settings.zero_one_var_freeze_step,
        settings.zero_one_var_update_scaler,
        settings.zero_one_local_step_scaler,
        settings.zero_one_local_step_clipper,
    )
    compressor = ZeroOneAdam(policy)
    compressor.update_rule = lambda rule, groups: ZeroOneAdamUpdate(rule.config, groups, compressor)
    return compressor
