"""Switches of torch and kernels for the whole process, from a configuration."""

import os

import torch

from megatron_core.config import RunConfig
from megatron_core.feature import load_hook, used_features
from megatron_core.ops.backend import validate_backend
from megatron_core.parallel import poison


def use_deterministic_kernels() -> None:
    """Restrict torch to deterministic kernels (``--deterministic-mode``)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is initialized; torch requires it
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def set_process_switches(config: RunConfig) -> None:
    """Poison buffers, and restrict torch's kernels, if configured."""
    if config.monitor.poison_buffers:
        poison.turn_on()
    if config.training.deterministic_mode:
        use_deterministic_kernels()
    if config.training.disable_bf16_reduced_precision_matmul:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def check_kernels(config: RunConfig, device: torch.device) -> None:
    """ConfigError unless the configured kernels are available, also those of features."""
    validate_backend(config.model.kernel_backend, device.type, getattr(torch, config.training.compute_dtype))
    for hook in (feature.check_device for feature in used_features(config)):
        if hook is not None:
            load_hook(hook)(config, device)
