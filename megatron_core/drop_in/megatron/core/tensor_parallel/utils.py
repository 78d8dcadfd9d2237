"""Splitting tensors and vocabularies."""

import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel.collectives import all_gather_flat_
from megatron_core.parallel.current import tensor_parallel_group
from megatron_core.parallel.groups import Group


def divide(numerator: int, denominator: int) -> int:
    """The quotient of two integers; ``LayoutError`` if there is a remainder."""
    if numerator % denominator:
        raise LayoutError(f"{numerator} is not divisible by {denominator}; change one of these sizes")
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[Tensor, ...]:
    """Equal parts of the last dim: views, or with ``contiguous_split_chunks`` contiguous copies."""
    chunks = tensor.split(divide(tensor.shape[-1], num_partitions), dim=-1)
    return tuple(chunk.contiguous() for chunk in chunks) if contiguous_split_chunks else chunks


def split_tensor_into_1d_equal_chunks(
    tensor: Tensor, new_buffer: bool = False, tp_group: Group | None = None
) -> Tensor:
    """This rank's part of the flattened tensor; with ``new_buffer`` a copy instead of a view."""
    group = tensor_parallel_group(tp_group)
    part = divide(tensor.numel(), group.size())
    chunk = tensor.reshape(-1)[group.rank() * part : (group.rank() + 1) * part]
    return chunk.clone() if new_buffer else chunk


def gather_split_1d_tensor(tensor: Tensor, tp_group: Group | None = None) -> Tensor:
    """The inverse of ``split_tensor_into_1d_equal_chunks``: all ranks' parts in one flat tensor."""
    group = tensor_parallel_group(tp_group)
    tensor = tensor.reshape(-1)
    if group.size() == 1:
        return tensor
    gathered = torch.empty(group.size() * tensor.numel(), dtype=tensor.dtype, device=tensor.device)
    all_gather_flat_(gathered, tensor.contiguous(), group)
    return gathered


class VocabUtility:
    """The half-open range of token ids on each rank."""

    @staticmethod
    def vocab_range_from_per_partition_vocab_size(
        per_partition_vocab_size: int, rank: int, world_size: int
    ) -> tuple[int, int]:
        """The range of ``rank`` if each one holds ``per_partition_vocab_size`` entries."""
        return rank * per_partition_vocab_size, (rank + 1) * per_partition_vocab_size

    @staticmethod
    def vocab_range_from_global_vocab_size(global_vocab_size: int, rank: int, world_size: int) -> tuple[int, int]:
        """The range of ``rank`` if all of them share ``global_vocab_size`` entries."""
        part = divide(global_vocab_size, world_size)
        return VocabUtility.vocab_range_from_per_partition_vocab_size(part, rank, world_size)
