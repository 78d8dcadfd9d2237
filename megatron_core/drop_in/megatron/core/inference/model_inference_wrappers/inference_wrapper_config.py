"""Former settings of a model for generation."""

from dataclasses import dataclass
from typing import Any


@dataclass
class InferenceWrapperConfig:
    """Settings that the model and its context have; they have no effect."""

    hidden_size: int
    params_dtype: Any
    inference_batch_times_seqlen_threshold: int
    padded_vocab_size: int
    inference_max_requests: int = 8
    inference_max_seq_length: int = 2560
    fp32_residual_connection: bool = False
    nccl_all_reduce_for_prefill: bool = False

    def add_attributes(self, attribute_value_pair: dict[str, Any]) -> None:
        """Set attributes, also ones that are not fields."""
        vars(self).update(attribute_value_pair)
