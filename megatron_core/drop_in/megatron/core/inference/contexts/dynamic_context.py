"""A batch of sequences that join and leave between two steps."""

from dataclasses import dataclass
from typing import Any

from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.base_context import BaseInferenceContext


class ContextOverflowError(Exception):
    """A request does not fit the context."""

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool = True) -> None:
        super().__init__(f"request {request_id}: {message or type(self).__doc__}")
        self.request_id, self.message, self.is_transient = request_id, message, is_transient


class RequestOverflowError(ContextOverflowError):
    """More requests than ``max_requests``."""


class TokenOverflowError(ContextOverflowError):
    """More tokens in a step than ``max_tokens``."""


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """A prompt with its continuation is longer than ``max_sequence_length``."""

    def __init__(self, request_id: int | None, message: str | None = None) -> None:
        super().__init__(request_id, message, is_transient=False)


class BlockOverflowError(ContextOverflowError):
    """The key-value cache has too few blocks."""


@dataclass
class BlockCounts:
    """Numbers of blocks of the key-value cache, set by the engine."""

    total_count: int = 0
    active_count: int = 0


def get_mem_size_str(n_bytes: int) -> str:
    """Return a size in GiB, MiB or KiB."""
    for power, unit in ((30, "gb"), (20, "mb"), (10, "kb")):
        if n_bytes >= 1 << power:
            return f"{n_bytes / (1 << power):.2f} {unit}"
    return f"{n_bytes} bytes"


class DynamicInferenceContext(BaseInferenceContext):
    """The sizes of an engine, and counts of its work; ``DynamicInferenceEngine`` has the keys and values."""

    def __init__(self, model_config: Any, inference_config: InferenceConfig | None = None) -> None:
        super().__init__(inference_config or InferenceConfig())
        config = self.config
        self.model_config = model_config
        self.max_sequence_length, self.block_size_tokens = config.max_sequence_length, config.block_size_tokens
        self.max_requests, self.max_tokens = config.max_requests or 256, config.max_tokens or 16384
        self.enable_prefix_caching = config.enable_prefix_caching
        self.unified_memory_level = config.unified_memory_level
        self.cuda_graph_batch_dimensions_list: list[Any] = []
        self.kv_block_allocator = BlockCounts()
        self.reset()

    def reset(self) -> None:
        """Set the counts to 0."""
        self.step_count = self.lifetime_prefill_token_count = self.total_request_count = 0
        self.async_sched_step_count = self.async_sched_compaction_step_count = 0

    def is_static_batching(self) -> bool:
        """Return False."""
        return False

    def get_active_request_count(self) -> int:
        """Return the number of requests in the engine."""
        return self.total_request_count
