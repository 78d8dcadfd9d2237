"""The fast paths of runs on GPUs, their conditions, and why one is off; for the start of a run and megatron-doctor."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.torch_version import TorchVersion

from megatron_core.config import RunConfig
from megatron_core.features.flex_attention.kernels import varlen_operator
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
    has_triton: bool
    has_grouped_products: bool
    has_varlen: bool
    native: str | None
    """Why the library of CUDA kernels is not used; None if it is."""

    @classmethod
    def current(cls) -> "Platform":
        """This process and its current GPU."""
        return cls(
            torch=torch.__version__,
            cuda=torch.version.cuda,
            capability=torch.cuda.get_device_capability() if torch.cuda.is_available() else None,
            has_triton=find_spec("triton") is not None,
            has_grouped_products=hasattr(torch.nn.functional, "grouped_mm"),
            has_varlen=varlen_operator() is not None,
            native=native.unavailable_reason("rms_norm", "cuda", torch.bfloat16),
        )

    def since(self, version: str, *, is_there: bool | None = None) -> str | None:
        """Why torch lacks a function of ``version``."""
        has_it = TorchVersion(self.torch) >= version if is_there is None else is_there
        return None if has_it else f"torch {self.torch} does not have it; use {version} or later"


@dataclass(frozen=True)
class FastPath:
    """A faster implementation, the runs that need it, and why a platform does not have it (None if it has)."""

    name: str
    is_needed: Callable[[RunConfig], bool]
    obstacle: Callable[[Platform], str | None]
    instead: str


def _in_16_bits(config: RunConfig) -> bool:
    return config.training.compute_dtype in ("bfloat16", "float16")


def _fp8_products(block: int | None, scales: str) -> FastPath:
    def is_needed(config: RunConfig) -> bool:
        settings: Any = config.training.section(FP8Config)
        return settings.fp8_format is not None and block_size(settings) == block

    return FastPath(
        f"FP8 products with scales of {scales}",
        is_needed,
        lambda gpu: missing(block, gpu.capability, gpu.cuda, gpu.torch),
        "products of dequantised matrices, slower than bfloat16",
    )


FAST_PATHS = (
    FastPath(
        "native CUDA kernels",
        lambda config: config.model.kernel_backend != "reference",
        lambda gpu: gpu.native,
        "operations in PyTorch",
    ),
    FastPath(
        "weight gradients added to float32 in one product",
        _in_16_bits,
        lambda gpu: gpu.since("2.10"),
        "a product and an addition, one more pass over each gradient",
    ),
    FastPath(
        "one product for all experts",
        lambda config: config.optional("num_experts") is not None,
        lambda gpu: gpu.since("2.10", is_there=gpu.has_grouped_products),
        "a product for each expert",
    ),
    FastPath(
        "variable-length attention of packed documents",
        lambda config: config.data.reset_attention_mask and _in_16_bits(config),
        lambda gpu: gpu.since("2.11", is_there=gpu.has_varlen),
        "attention of each document in turn",
    ),
    FastPath(
        "FlexAttention for windows and bounded scores",
        lambda config: config.model.attn_logit_softcapping is not None or config.model.window_size is not None,
        lambda gpu: None if gpu.has_triton else "Triton, which compiles it, is not installed",
        "the formula of attention in blocks of queries",
    ),
    _fp8_products(None, "tensors and rows"),
    _fp8_products(BLOCK, "128 x 128 blocks"),
    _fp8_products(SMALL_BLOCK, "32 elements"),
)


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
