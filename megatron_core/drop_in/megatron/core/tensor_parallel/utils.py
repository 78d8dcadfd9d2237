"""Splits of tensors and vocabularies."""

import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel.collectives import all_gather_flat_
from megatron_core.parallel.current import tensor_parallel_group
from megatron_core.parallel.groups import Group


def divide(numerator: int, denominator: int) -> int:
    """Return the quotient of two integers; LayoutError if there is a remainder."""
    if numerator % denominator:
        raise LayoutError(f"{numerator} is not divisible by {denominator}; change one of these sizes")
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Return equal parts of the last dim: views, or contiguous copies with ``contiguous_split_chunks``."""
    chunks = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: Group | None = None
) -> Tensor:
    """Return this rank's part of the flattened tensor; with ``new_buffer`` a copy instead of a view."""
    group = tensor_parallel_group(tp_group)
    part = divide(tensor.numel(), group.size())
    chunk = tensor.reshape(-1)[group.rank() * part : (group.rank() + 1) * part]
    return chunk.clone() if new_buffer else chunk


def gather_split_1d_tensor(tensor: Tensor, tp_group: Group | None = None) -> Tensor:
    """Return the parts of all ranks as one flat tensor: the inverse of ``split_tensor_into_1d_equal_chunks``."""
    group = tensor_parallel_group(tp_group)
    tensor = tensor.reshape(-1)
    if group.size() == 1:
        return tensor
    gathered = torch.empty(group.size() * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    all_gather_flat_(gathered, tensor.contiguous(), group)
    return gathered


class VocabUtility:
    """Half-open ranges of token ids on each rank."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """Return the range of ``rank`` if each rank has ``per_partition_vocab_size`` entries."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """Return the range of ``rank`` if the ranks share ``global_vocab_size`` entries."""
        part = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(part, rank, world_size)
