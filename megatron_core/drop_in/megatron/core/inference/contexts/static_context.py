"""A batch of sequences that start and end together."""

from typing import Any

from torch import Tensor

from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.base_context import BaseInferenceContext
from megatron_core.inference.kv_cache import KVCache


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
