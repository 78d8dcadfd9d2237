"""Recompute activations in backward instead of keeping them, or keep them in host memory.

Sources: Chen et al. 2016 and Korthikanti et al. 2022, section 5, for recomputation; Rhu et al. 2016 and Ren et al. 2021
for offloading.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_core.config import ModelConfig


def recomputed(function: Callable) -> Callable:
    """Wrap ``function`` so that only its inputs are kept for backward.

    No generator state is saved: dropout masks are functions of their coordinates, so recomputed masks are equal.
    """
    return lambda *args: checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_runs(config: ModelConfig, num_layers: int) -> list[tuple[range, bool]]:
    """Divide a stage's layers into runs (local numbers, whether the run is recomputed as one).

    ``uniform``: runs of ``recompute_num_layers`` layers; all runs are recomputed, and each keeps its first input.
    ``block``: the first ``recompute_num_layers`` layers are recomputed one by one; the others keep all activations.
    Each layer with offloaded activations is a separate run; of a recomputed run only the input is offloaded.
    """
    every = config.recompute_num_layers or 1
    if config.recompute_granularity != "full":
        away = min(config.cpu_offloading_num_layers, num_layers)
        return [(range(i, i + 1), False) for i in range(away)] + [(range(away, num_layers), False)]
    if config.recompute_method == "uniform":
        return [(range(i, min(i + every, num_layers)), True) for i in range(0, num_layers, every)]
    return [(range(i, i + 1), i < every) for i in range(num_layers)]


@dataclass(frozen=True)
class _Dropped:
    """Offset, size and strides of a discarded tensor within a recomputable output."""

    output: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def outputs_dropped(
    outputs: Sequence[Tensor], again: Callable[[], Sequence[Tensor]], *, active: bool
) -> AbstractContextManager[None]:
    """Return a context in which autograd does not save the memory of ``outputs``.

    Backward calls ``again``, which must return the same outputs in the same memory layout. The graph that produced
    ``outputs`` still saves the tensors it needs; only operations inside the context do not.
    Source: Megatron Core's ``CheckpointWithoutOutput``, which frees the storage of its outputs instead.
    """
    return _dropping(outputs, again) if active and torch.is_grad_enabled() else nullcontext()


@contextmanager
def _dropping(outputs: Sequence[Tensor], again: Callable[[], Sequence[Tensor]]) -> Iterator[None]:
    places = {output.untyped_storage().data_ptr(): at for at, output in enumerate(outputs)}
    found: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor | _Dropped:
        at = places.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if at is None:
            return tensor
        return _Dropped(at, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Tensor | _Dropped) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        if not found:
            with torch.no_grad():
                found.extend(again())
        return found[packed.output].as_strided(packed.size, packed.stride, packed.offset)

    with saved_tensors_hooks(pack, unpack):
        yield


def offloaded(function: Callable[..., Any], modules: list[nn.Module]) -> Callable[..., Any]:
    """Wrap ``function`` of ``modules`` so that its saved tensors are kept in host memory until backward.

    Each tensor that autograd saves is copied to the host when it is saved, and back when backward needs it; weights
    stay on the device. Copies use pinned memory and the compute stream, so the host never waits.
    """
    # Collect the addresses in each forward: ZeRO 3 allocates the weights again each time.
    return lambda *args, **kwargs: _run_offloaded(
        lambda: function(*args, **kwargs), {_memory(p) for module in modules for p in module.parameters()}
    )


def _run_offloaded(function: Callable[[], Any], weights: set[int]) -> Any:
    def pack(tensor: Tensor) -> tuple[torch.device, Tensor]:
        stays = is_on_host(tensor) or _memory(tensor) in weights
        return tensor.device, tensor if stays else to_host(tensor)

    with saved_tensors_hooks(pack, lambda packed: packed[1].to(packed[0], non_blocking=True)):
        return function()


def is_on_host(tensor: Tensor) -> bool:
    """Whether the tensor is already on the CPU."""
    return tensor.device.type == "cpu"


def to_host(tensor: Tensor) -> Tensor:
    """Copy the tensor to host memory, pinned if the tensor is on a GPU."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    return copy.copy_(tensor, non_blocking=True)


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
