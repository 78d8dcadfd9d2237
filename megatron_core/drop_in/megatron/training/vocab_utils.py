"""The size of the vocabulary with padding."""

from megatron.training.utils.common_utils import print_rank_0
from megatron_core.errors import ConfigError


def calculate_padded_vocab_size(
    vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int, logging_enabled: bool = True
) -> int:
    """Return the size rounded up to a multiple of make_vocab_size_divisible_by x tensor_model_parallel_size."""
    sizes = {
        "vocab_size": vocab_size,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
        "tensor_model_parallel_size": tensor_model_parallel_size,
    }
    for name, size in sizes.items():
        if size <= 0:
            raise ConfigError(f"{name} must be positive, but it is {size}")
    unit = make_vocab_size_divisible_by * tensor_model_parallel_size
    padded = -(-vocab_size // unit) * unit
    if logging_enabled:
        print_rank_0(
            f" > padded vocab (size: {vocab_size}) with {padded - vocab_size} dummy tokens (new size: {padded})"
        )
    return padded
