"""``PartitionedTensor``: a tensor of which each rank of a group holds a part."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_core.any_model.partition import uniform_bounds
from megatron_core.errors import LayoutError


class PartitionedTensor:
    """This rank's part of a tensor that is equal on all ranks of ``group``: neighbouring elements, copied.

    ``partition`` has the bounds of the parts among the flattened elements.
    """

    def __init__(self, tensor: Tensor, group: ProcessGroup | None) -> None:
        bounds = uniform_bounds(tensor.numel(), dist.get_world_size(group))
        start, end = bounds[dist.get_rank(group) :][:2]
        self._set(tensor.shape, bounds, tensor.detach().reshape(-1)[start:end].clone(), group)

    def _set(self, shape: Sequence[int], bounds: list[int], part: Tensor, group: ProcessGroup | None) -> None:
        self.orig_size, self.partition, self.local_data, self.group = list(shape), bounds, part, group
        self.num_parts, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.orig_device: torch.device | str = part.device

    @classmethod
    def from_meta(
        cls, meta: Tensor, local_part: Tensor, group: ProcessGroup | None, device: torch.device | str | None = None
    ) -> PartitionedTensor:
        """Return the tensor that ``to_meta`` described, from this rank's part; ``LayoutError`` for another group."""
        dims, *rest = meta.tolist()
        shape, (parts, rank, *bounds) = rest[:dims], rest[dims:]
        found = cls.__new__(cls)
        found._set(shape, bounds, local_part.detach(), group)
        if (parts, rank) != (found.num_parts, found.rank):
            raise LayoutError(
                f"PartitionedTensor.from_meta: part {rank} of {parts} cannot be used on rank {found.rank} of a group "
                f"of {found.num_parts}; give the group and the rank of to_meta"
            )
        found.orig_device = found.orig_device if device is None else device
        return found

    def to_meta(self) -> Tensor:
        """Return integers that describe the parts, for ``from_meta``."""
        shape = [len(self.orig_size), *self.orig_size]
        return torch.tensor([*shape, self.num_parts, self.rank, *self.partition], device=self.orig_device)

    def full(self, device: torch.device | str | None = None) -> Tensor:
        """Gather and return the whole tensor."""
        longest = max(end - start for start, end in zip(self.partition, self.partition[1:], strict=False))
        padded = self.local_data.new_zeros(longest)
        padded[: self.local_data.numel()] = self.local_data
        rows = padded.new_empty(self.num_parts, longest)
        dist.all_gather_into_tensor(rows.view(-1), padded, group=self.group)
        parts = [
            row[: end - start] for row, start, end in zip(rows, self.partition[:-1], self.partition[1:], strict=True)
        ]
        return torch.cat(parts).view(self.orig_size).to(self.orig_device if device is None else device)

    def data(self) -> Tensor:
        """Return this rank's elements."""
        return self.local_data

    def local_size(self) -> torch.Size:
        """Return the shape of this rank's elements: one dimension."""
        return self.local_data.size()

    def full_size(self) -> list[int]:
        """Return the shape of the whole tensor."""
        return self.orig_size
