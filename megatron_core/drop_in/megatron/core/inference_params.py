"""What a model is given in generation, for the annotations of callers' own modules.

The models of this package refuse it; ``inference`` generates.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class BaseInferenceContext:
    """Whatever keeps keys and values between the steps of a generation."""

    def is_static_batching(self) -> bool:
        """Whether all sequences of a batch begin and end together."""
        return True


class StaticInferenceContext(BaseInferenceContext):
    """How long sequences may become, and how much of them there is."""

    def __init__(self, max_batch_size: int, max_sequence_length: int) -> None:
        self.max_batch_size, self.max_sequence_length = max_batch_size, max_sequence_length
        self.sequence_len_offset = self.batch_size_offset = 0
        self.key_value_memory_dict: dict[Any, Tensor] = {}


InferenceParams = StaticInferenceContext
