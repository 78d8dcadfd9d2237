"""Base class of the operations' handles of our own process groups, and their copies to lists of tensors."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


class FilledWork(dist.Work):
    """The handle of an operation that fills tensors; subclasses define ``wait`` and ``is_completed``."""

    def __init__(self, filled: list[Tensor]) -> None:
        super().__init__()
        self._filled = filled

    def is_success(self) -> bool:
        """Whether the operation is complete."""
        return self.is_completed()

    def result(self) -> list[Tensor]:
        """The filled tensors."""
        self.wait()
        return self._filled

    def get_future(self) -> torch.futures.Future:
        """A completed future: no thread could complete it later."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


def spread(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    """Copy the elements of ``flat`` into ``tensors``, in order."""
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(values.view(tensor.shape))
