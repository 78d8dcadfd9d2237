"""Settings of an engine with Megatron Core's names."""

from dataclasses import InitVar, dataclass
from enum import Enum
from typing import Any, ClassVar

from megatron.core.mirror import mirror
from megatron_core.drop_in.unsupported import Unsupported
from megatron_core.errors import ConfigError
from megatron_core.inference import settings as engine


class MambaInferenceStateConfig(Unsupported):
    """States of Mamba layers; hybrid models are not supported."""

    message: ClassVar[str] = "MambaInferenceStateConfig: hybrid models are not supported"

    @classmethod
    def from_model(cls, model: Any, *args: Any, **kwargs: Any) -> None:
        """Return None: no model here has Mamba layers."""
        return


def _words(name: str, *values: str) -> Any:
    """Return an enumeration of texts, whose members are their upper-case forms."""
    return Enum(name, [(value.upper(), value) for value in values], type=str, module=__name__)


PrefixCachingEvictionPolicy = _words("PrefixCachingEvictionPolicy", "ref_zero", "lru")
"""When an unused block of a prefix is freed; the engine here frees the least recently used ones."""
PrefixCachingCoordinatorPolicy = _words(
    "PrefixCachingCoordinatorPolicy", "longest_prefix", "first_prefix_block", "load_balanced"
)
"""How requests are distributed over data-parallel ranks."""
KVCacheManagementMode = _words("KVCacheManagementMode", "persist", "offload", "recompute")
"""Treatment of the cache when an engine is suspended."""
CudaGraphSizingDistribution = _words("CudaGraphSizingDistribution", "exponential", "linear")
"""Distances between the sizes of CUDA graphs; without effect here."""
AsyncScheduleMode = _words("AsyncScheduleMode", "legacy", "async")
"""Order of the phases of a step; without effect here."""


@dataclass
class InferenceConfig(mirror("InferenceConfig", kw_only=True)):  # type: ignore[misc]
    """Settings of ``DynamicInferenceContext``.

    Read are ``block_size_tokens``, ``buffer_size_gb`` (an upper bound: memory is allocated as texts grow),
    ``max_requests``, ``max_tokens``, ``max_sequence_length``, ``enable_chunked_prefill``, ``enable_prefix_caching``,
    ``materialize_only_last_token_logits`` and ``track_generated_token_events``. The others change kernels, buffers or
    the distribution over data-parallel ranks, and have no effect on results.
    """

    block_size_tokens: int = 256
    buffer_size_gb: float = 20
    max_requests: int | None = None
    max_tokens: int | None = None
    unified_memory_level: int = 0
    kv_cache_management_mode: Any = KVCacheManagementMode.PERSIST
    cuda_graph_sizing_distribution: Any = CudaGraphSizingDistribution.EXPONENTIAL
    max_sequence_length: int = 2560
    materialize_only_last_token_logits: bool = True
    enable_chunked_prefill: bool = False
    num_speculative_tokens: int = 0
    enable_prefix_caching: bool = False
    prefix_caching_eviction_policy: Any = PrefixCachingEvictionPolicy.REF_ZERO
    prefix_caching_coordinator_policy: Any = PrefixCachingCoordinatorPolicy.LOAD_BALANCED
    prefix_caching_routing_alpha: float = 0.5
    track_generated_token_events: bool = False
    async_sched_mode: Any = AsyncScheduleMode.LEGACY
    logprobs_mode: str = "raw_logprobs"
    verbose: InitVar[bool] = False

    def __post_init__(self, verbose: bool) -> None:
        self._verbose = verbose
        self.async_sched_mode = AsyncScheduleMode(self.async_sched_mode)
        if not 0.0 <= self.prefix_caching_routing_alpha <= 1.0:
            raise ValueError(f"prefix_caching_routing_alpha must be in [0, 1], got {self.prefix_caching_routing_alpha}")
        if self.logprobs_mode not in ("raw_logprobs", "processed_logprobs"):
            raise ValueError(
                f"Unsupported logprobs_mode {self.logprobs_mode!r}; give raw_logprobs or processed_logprobs"
            )
        if self.logprobs_mode == "processed_logprobs" and self.num_speculative_tokens > 0:
            raise ValueError("logprobs_mode='processed_logprobs' is not supported with num_speculative_tokens > 0")

    def for_engine(self) -> engine.InferenceConfig:
        """Return the engine's settings. Errors: ``ConfigError`` for features that it does not have."""
        if self.num_speculative_tokens:
            raise ConfigError(f"num_speculative_tokens={self.num_speculative_tokens} is not supported; give 0")
        if self.logprobs_mode != "raw_logprobs":
            raise ConfigError(f"logprobs_mode={self.logprobs_mode!r} is not supported; give 'raw_logprobs'")
        return engine.InferenceConfig(
            inference_dynamic_batching_block_size=self.block_size_tokens,
            inference_dynamic_batching_buffer_size_gb=float(self.buffer_size_gb),
            inference_dynamic_batching_max_tokens=self.max_tokens or 16384,
            enable_chunked_prefill=self.enable_chunked_prefill,
            inference_dynamic_batching_prefix_caching=self.enable_prefix_caching,
        )
