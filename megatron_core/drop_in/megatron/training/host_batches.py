"""Batches on the CPU whose tensors accept ``cuda()``."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


class HostTensor(Tensor):
    """A CPU tensor whose ``cuda()`` returns it: programs for Megatron-LM call it for each tensor of a batch.

    Results of operations on it are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def cuda(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the tensor as a plain tensor: the device of the run is the CPU."""
        return self.as_subclass(Tensor)


def host_batches(batches: Iterable[Any]) -> Iterator[Any]:
    """Yield the batches; tensors in dictionaries become ``HostTensor``."""
    for batch in batches:
        if isinstance(batch, dict):
            yield {name: x.as_subclass(HostTensor) if isinstance(x, Tensor) else x for name, x in batch.items()}
        else:
            yield batch
