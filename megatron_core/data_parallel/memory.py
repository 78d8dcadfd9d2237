"""Move parameters into flat buffers."""

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
