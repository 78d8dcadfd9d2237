"""The order of the samples in Megatron's order."""

import numpy as np

# From here on a number of a sample, and Megatron's margin above it, does not fit 32 bits.
TOO_MANY_FOR_UINT32 = np.iinfo(np.uint32).max - 1


def build_shuffle_index(first: int, total: int, state: np.random.RandomState) -> np.ndarray:
    """A permutation of [0, first), then one of [first, total): uint32 [total], int64 from 2**32 - 2 samples on.

    The numbers that are drawn from `state`, and their order, are Megatron-LM's.
    """
    index = np.arange(total, dtype=np.uint32 if total < TOO_MANY_FOR_UINT32 else np.int64)
    state.shuffle(index[:first])
    if first != total:
        state.shuffle(index[first:])
    return index
