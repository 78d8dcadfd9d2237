"""The fast paths of runs on GPUs, their conditions, and why one is off; for the start of a run and megatron-doctor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional
from torch.torch_version import TorchVersion

from megatron_core.config import RunConfig
from megatron_core.features.fp8.rules import block_size
from megatron_core.features.fp8.scaled_product import missing
from megatron_core.features.fp8.settings import BLOCK, SMALL_BLOCK, FP8Config
from megatron_core.ops import native


@dataclass(frozen=True)
class Platform:
    """The properties of torch and of the GPU on which fast paths depend."""

    torch: str
    cuda: str | None
    capability: tuple[int, int] | None
    """Compute capability; None without a GPU."""
    has_triton: bool
    has_grouped_products: bool
    varlen_arguments: frozenset[str]
    """Arguments of ``varlen_attn``; empty if torch has none."""
    native: str | None
    """Why the library of CUDA kernels is not used; None if it is."""

    @classmethod
    def current(cls) -> Platform:
        """This process and its current GPU."""
        try:
            from torch.nn.attention.varlen import varlen_attn

            arguments = frozenset(inspect.signature(varlen_attn).parameters)
        except ImportError:
            arguments = frozenset()
        return cls(
            torch=torch.__version__,
            cuda=torch.version.cuda,
            capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
            has_triton=find_spec("triton") is not None,
            has_grouped_products=hasattr(functional, "grouped_mm"),
            varlen_arguments=arguments,
            native=native.unavailable_reason("rms_norm", "cuda", torch.bfloat16),
        )


@dataclass(frozen=True)
class FastPath:
    """A faster implementation, the runs that need it, and why a platform does not have it (None if it has)."""

    name: str
    is_needed: Callable[[RunConfig], bool]
    obstacle: Callable[[Platform], str | None]
    instead: str


def _since(version: str, platform: Platform) -> str | None:
    if TorchVersion(platform.torch) >= version:
        return None
    return f"torch {platform.torch} does not have it; use {version} or later"


def _fp8(block: int | None) -> Callable[[Platform], str | None]:
    return lambda platform: missing(block, platform.capability, platform.cuda, platform.torch)


def _uses_fp8(config: RunConfig, block: int | None) -> bool:
    settings: Any = config.training.section(FP8Config)
    return settings.fp8_format is not None and block_size(settings) == block


def _varlen(platform: Platform) -> str | None:
    if {"window_size", "enable_gqa"} <= platform.varlen_arguments:
        return None
    return f"torch {platform.torch} has no varlen_attn with windows and grouped queries; use 2.11 or later"


def _in_16_bits(config: RunConfig) -> bool:
    return config.training.compute_dtype in ("bfloat16", "float16")


FAST_PATHS = (
    FastPath(
        "native CUDA kernels",
        lambda config: config.model.kernel_backend != "reference",
        lambda platform: platform.native,
        "operations in PyTorch",
    ),
    FastPath(
        "weight gradients added to float32 in one product",
        _in_16_bits,
        lambda platform: _since("2.10", platform),
        "a product and an addition, one more pass over each gradient",
    ),
    FastPath(
        "one product for all experts",
        lambda config: config.model.num_experts is not None,
        lambda platform: None if platform.has_grouped_products else _since("2.10", platform),
        "a product for each expert",
    ),
    FastPath(
        "variable-length attention of packed documents",
        lambda config: config.data.reset_attention_mask and _in_16_bits(config),
        _varlen,
        "attention of each document in turn",
    ),
    FastPath(
        "FlexAttention for windows and bounded scores",
        lambda config: config.model.attn_logit_softcapping is not None or config.model.window_size is not None,
        lambda platform: None if platform.has_triton else "Triton, which compiles it, is not installed",
        "the formula of attention in blocks of queries",
    ),
    *(
        FastPath(
            f"FP8 products with scales of {extent}",
            lambda config, block=block: _uses_fp8(config, block),
            _fp8(block),
            "products of dequantised matrices, slower than bfloat16",
        )
        for block, extent in ((None, "tensors and rows"), (BLOCK, "128 x 128 blocks"), (SMALL_BLOCK, "32 elements"))
    ),
)
"""The table."""


def disabled_paths(config: RunConfig, platform: Platform) -> Iterator[str]:
    """A note for each fast path that ``config`` would use and ``platform`` does not have."""
    for path in FAST_PATHS:
        reason = path.obstacle(platform) if path.is_needed(config) else None
        if reason is not None:
            yield f"fast path off: {path.name}: {reason}; instead {path.instead}"


def describe_paths(platform: Platform) -> Iterator[str]:
    """A line for every fast path: on, or why not."""
    for path in FAST_PATHS:
        yield f"{path.name}: {path.obstacle(platform) or 'on'}"
