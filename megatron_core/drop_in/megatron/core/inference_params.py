"""Contexts of generation, for annotations of callers' modules.

The models of the drop-in do not accept them; ``megatron_core.inference`` generates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class BaseInferenceContext:
    """A store of keys and values between the steps of a generation."""

    def is_static_batching(self) -> bool:
        """Whether all sequences of a batch start and end together."""
        return True


class StaticInferenceContext(BaseInferenceContext):
    """The maximum and the current size of a batch of sequences."""

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.sequence_len_offset = self.batch_size_offset = 0
        self.key_value_memory_dict: dict[Any, Tensor] = {}


InferenceParams = StaticInferenceContext
