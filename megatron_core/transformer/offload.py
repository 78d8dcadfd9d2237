"""Offload activations to host memory between forward and backward (Ren et al. 2021; Rhu et al. 2016).

Each tensor that autograd saves in a layer is copied to the host when it is saved and back to the device when backward
needs it; weights stay on the device. Copies use pinned memory and the compute stream, so the host never waits.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def offloaded(function: Callable[[Tensor], Tensor], modules: list[nn.Module]) -> Callable[[Tensor], Tensor]:
    """Wrap ``function`` of ``modules`` so that its saved tensors are kept in host memory until backward."""
    # Collect the addresses in each forward: ZeRO 3 allocates the weights anew each time.
    return lambda x: _run(function, x, {_memory(p) for module in modules for p in module.parameters()})


def _run(function: Callable[[Tensor], Tensor], x: Tensor, weights: set[int]) -> Tensor:
    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        stays = is_on_host(tensor) or _memory(tensor) in weights
        return tensor.device, tensor if stays else to_host(tensor)

    with saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0], non_blocking=True)):
        return function(x)


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the tensor is already on the CPU."""
    return tensor.device.type == "cpu"


def to_host(tensor: Tensor) -> Tensor:
    """Copy the tensor to host memory, pinned if the tensor is on a GPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor, non_blocking=True)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
