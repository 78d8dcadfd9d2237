"""Contexts of generation: batches whose sequences start together, or join and leave between two steps."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron.core.inference.config import InferenceConfig
from megatron_core.inference.kv_cache import KVCache


class BaseInferenceContext:
    """The sizes of a generation; its keys and values are in the engine."""

    max_sequence_length: int
    sequence_len_offset: int = 0
    batch_size_offset: int = 0

    def __init__(self, inference_config: InferenceConfig) -> None:
        self.config = inference_config

    @property
    def materialize_only_last_token_logits(self) -> bool:
        """Whether only the logits of the last token of each sequence are computed."""
        return self.config.materialize_only_last_token_logits

    def is_static_batching(self) -> bool:
        """Whether all sequences of a batch start and end together."""
        raise NotImplementedError

    def is_dynamic_batching(self) -> bool:
        """Whether sequences join and leave the batch between steps."""
        return not self.is_static_batching()

    def increment_sequence_len_offset(self, increment: int) -> None:
        """Move to the next positions."""
        self.sequence_len_offset += increment

    def increment_batch_size_offset(self, increment: int) -> None:
        """Move to the next sequences."""
        self.batch_size_offset += increment

    def reset_batch_size_offset(self) -> None:
        """Move to the first sequence."""
        self.batch_size_offset = 0


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


class StaticInferenceContext(BaseInferenceContext):
    """The largest and the current sizes of a batch of sequences."""

    def __init__(
        self, max_batch_size: int, max_sequence_length: int, use_flashinfer_fused_rope: bool | None = None
    ) -> None:
        super().__init__(InferenceConfig(materialize_only_last_token_logits=True))
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.key_value_memory_dict: dict[Any, tuple[Tensor, Tensor]] = {}
        self.engine_cache: KVCache | None = None
        """Keys and values of ``GPTInferenceWrapper.run_one_forward_step``."""
        self.decode_mode = False

    def is_static_batching(self) -> bool:
        """Return True."""
        return True

    def enable_prefill_mode(self) -> None:
        """Record that prompts are computed."""
        self.decode_mode = False

    def enable_decode_mode(self) -> None:
        """Record that new tokens are computed."""
        self.decode_mode = True

    def is_decode_only(self) -> bool:
        """Return whether new tokens are computed."""
        return self.decode_mode

    def swap_key_value_dict(self, batch_idx: list[int]) -> None:
        """Reorder the sequences in ``key_value_memory_dict``, tensors ``[s, b, heads, channels]``."""
        if not self.key_value_memory_dict:
            raise ValueError("key_value_memory_dict is empty; there is nothing to reorder")
        for layer, pair in self.key_value_memory_dict.items():
            keys, values = (memory[:, batch_idx] for memory in pair)
            self.key_value_memory_dict[layer] = (keys, values)

    def reset(self) -> None:
        """Prepare for another batch."""
        self.sequence_len_offset = self.batch_size_offset = 0
        self.engine_cache, self.decode_mode = None, False

    def __str__(self) -> str:
        return (
            f"StaticInferenceContext(max_batch_size={self.max_batch_size}, "
            f"max_sequence_length={self.max_sequence_length}, sequence_len_offset={self.sequence_len_offset})"
        )
