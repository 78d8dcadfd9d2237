"""Recompute activations in backward instead of keeping them (Chen et al. 2016; Korthikanti et al. 2022, section 5)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron_core.config import ModelConfig


def recomputed(function: Callable) -> Callable:
    """Wrap ``function`` so that only its inputs are kept for backward.

    No generator state is saved: dropout masks are functions of their coordinates, so recomputed masks are equal.
    """
    # The reentrant form needs an input that requires a gradient, and does not support ``torch.autograd.grad``.
    return lambda *args: checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)


def recompute_runs(config: ModelConfig, num_layers: int) -> list[tuple[range, bool]]:
    """Divide a stage's layers into runs (local numbers, whether the run is recomputed as one).

    ``uniform``: runs of ``recompute_num_layers`` layers; all runs are recomputed, and each keeps its first input.
    ``block``: the first ``recompute_num_layers`` layers are recomputed one by one; the others keep all activations.
    Of a recomputed run only the input is offloaded.
    """
    every = config.recompute_num_layers or 1
    if config.recompute_granularity != "full":
        return [(range(i, i + 1), False) for i in range(num_layers)]
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
    # By memory, because operations save views of an output, and other tensor objects of it.
    places = {output.untyped_storage().data_ptr(): index for index, output in enumerate(outputs)}
    recomputed_outputs: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor | _Dropped:
        index = places.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        if index is None:
            return tensor
        return _Dropped(index, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(packed: Tensor | _Dropped) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        # Once for all tensors that were dropped in this context.
        if not recomputed_outputs:
            # Only values are needed: the graph of the outputs exists.
            with torch.no_grad():
                recomputed_outputs.extend(again())
        return recomputed_outputs[packed.output].as_strided(packed.size, packed.stride, packed.offset)

    with saved_tensors_hooks(pack, unpack):
        yield
