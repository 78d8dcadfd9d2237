"""Memory of buckets: the device of flat buffers, and the placement of shards."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_core.parallel.handles import Done

Initialise = Callable[[str, nn.Parameter], None]


class TransferHandle(Protocol):
    """The handle of a transfer."""

    def wait(self) -> object:
        """Wait until the values have arrived."""


@torch.no_grad()
def materialise(parameter: nn.Parameter, memory: Tensor, name: str, initialise: Initialise | None) -> None:
    """Move a parameter from the meta device into ``memory``; object identity and attributes are preserved."""
    # A swap, because assigning ``.data`` cannot change the device of a parameter on meta, and modules, hooks and tied
    # weights refer to this object.
    real = nn.Parameter(memory.new_empty(0), requires_grad=parameter.requires_grad)
    # Attributes such as the shard's description and the hooks of the program stay with the parameter.
    vars(real).update(vars(parameter))
    torch.utils.swap_tensors(parameter, real)
    # assign .data, as for other parameters, so that autograd does not regard gathers as modifications
    parameter.data = memory
    if initialise is not None:
        initialise(name, parameter)


class Placement:
    """Placement of shards on a device. Derived classes keep them elsewhere and transfer the parts that are used."""

    is_offloaded = False
    """Whether the tensors are outside of the device's memory."""
    is_mapped = False
    """Whether the tensors are in files, so that parts have to be read into memory before they are used."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def tensor(self, name: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor of zeros in this placement."""
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def chunks(self, numel: int) -> Iterator[slice]:
        """Yield the slices in which a shard is updated."""
        yield slice(0, numel)

    def memory_for(self, piece: Tensor, spare: Tensor | None = None) -> Tensor:
        """Return memory for a part of a tensor: the part itself unless it is in a file, then perhaps ``spare``."""
        return piece

    def read(self, piece: Tensor, memory: Tensor) -> TransferHandle:
        """Start to read ``piece`` into ``memory``, the result of ``memory_for``."""
        return Done()

    def fetch(self, piece: Tensor, device: torch.device) -> tuple[Tensor, TransferHandle]:
        """Return memory that has the values of ``piece`` after the handle's ``wait``, if possible on ``device``."""
        return piece, Done()

    def store(self, piece: Tensor, values: Tensor) -> TransferHandle:
        """Start to write ``values``, which are in memory of ``memory_for``."""
        return Done()

    def evict(self) -> None:
        """Remove the tensors from memory, if they are in files."""


class BucketMemory:
    """Memory of the buckets of a rank, on ``device`` or by default on the device of the parameters.

    Parameters on the meta device get memory one bucket at a time, initialised by ``initialise``: a large model need not
    fit into memory before it is sharded.
    """

    updates: Callable[[], Any] | None = None
    """Class derived from ``optimizer.shard.ShardUpdates``, which updates shards that are not on the device."""

    def __init__(self, device: torch.device | None = None, initialise: Initialise | None = None) -> None:
        self.device = device
        self.initialise = initialise

    def adopt(self, name: str, parameter: nn.Parameter, memory: Tensor) -> None:
        """Move ``parameter`` into ``memory``, a view of a buffer."""
        if parameter.is_meta and not memory.is_meta:
            materialise(parameter, memory, name, self.initialise)
        else:
            memory.copy_(parameter.data)
            parameter.data = memory

    def placement_of(self, weights: Tensor) -> Placement:
        """The placement of this rank's shard of a bucket's ``weights`` at stage 3."""
        return Placement(weights.device)

    def state_placements(self, buckets: Sequence[Any]) -> Iterator[Placement]:
        """Yield the placement of the optimizer's state for each of ``buckets``."""
        for bucket in buckets:
            yield Placement(bucket.weights.device)
