"""Memory of parameters and of flat buffers."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

Initialise = Callable[[str, nn.Parameter], None]


@torch.no_grad()
def materialise(parameter: nn.Parameter, memory: Tensor, name: str, initialise: Initialise | None) -> None:
    """Move a parameter from the meta device into ``memory``; object identity and attributes are preserved."""
    real = nn.Parameter(memory.new_empty(0), requires_grad=parameter.requires_grad)
    vars(real).update(vars(parameter))
    torch.utils.swap_tensors(parameter, real)
    # assign .data, as for other parameters, so that autograd does not regard gathers as modifications
    parameter.data = memory
    if initialise is not None:
        initialise(name, parameter)


def release(flat: Tensor) -> None:
    """Free the memory of ``flat`` and of all its views; the tensor objects remain."""
    flat.untyped_storage().resize_(0)


def acquire(flat: Tensor) -> None:
    """Reallocate the memory of ``flat`` and its views."""
    flat.untyped_storage().resize_(flat.numel() * flat.element_size())
