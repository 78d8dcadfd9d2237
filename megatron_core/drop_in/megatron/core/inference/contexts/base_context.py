"""Base class of contexts of generation."""

from megatron.core.inference.config import InferenceConfig


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
