"""Recompute the activations of units of any module in backward, or keep them in host memory."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, update_wrapper
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron_core.any_model.context_attention import current_forward, disable_cache
from megatron_core.config import ModelConfig
from megatron_core.errors import ConfigError
from megatron_core.features.offload.activations import ActivationOffload
from megatron_core.parallel.compiled import DerivedForward


def save_memory(model: nn.Module, units: Sequence[nn.Module], config: ModelConfig) -> None:
    """Replace ``forward`` of units so that they keep less for backward; losses and gradients do not change.

    With ``recompute_granularity="full"`` the first ``recompute_num_layers`` units (default: all) keep only their
    inputs (Chen et al. 2016): backward runs their forward again, with the same random numbers, and restores their
    buffers. With ``cpu_offloading`` the first ``cpu_offloading_num_layers`` units keep their saved tensors (of a
    recomputed unit: its inputs) in host memory. Errors: ``ConfigError`` for more units than there are.
    """
    recompute = 0
    if config.recompute_granularity == "full":
        recompute = len(units) if config.recompute_num_layers is None else config.recompute_num_layers
    elif config.recompute_granularity is not None or config.recompute_num_layers is not None:
        raise ConfigError(
            f"recompute_granularity={config.recompute_granularity!r} with recompute_num_layers="
            f"{config.recompute_num_layers}: the parts of a layer of your own model are not known; use "
            "recompute_granularity='full', with recompute_num_layers for fewer units"
        )
    if config.cpu_offloading != (config.cpu_offloading_num_layers > 0):
        raise ConfigError(
            f"cpu_offloading={config.cpu_offloading} and cpu_offloading_num_layers={config.cpu_offloading_num_layers} "
            "need each other; set both, or neither"
        )
    for name, wanted in (("recompute_num_layers", recompute), ("cpu_offloading_num_layers", _away(config))):
        if wanted > len(units) or (wanted and not units):
            raise ConfigError(f"{name}={wanted}: the model has {len(units)} units; choose others with unit_classes")
    if recompute:
        disable_cache(model)
    offload = ActivationOffload(_away(config))
    for number, unit in enumerate(units):
        # torch.nn.Module.__call__ reads the attribute, and its hooks run outside of it.
        if number < recompute:
            unit.forward = recompute_in_backward(unit, unit.forward)
        if number <= _away(config) > 0:
            unit.forward = _offloaded(offload, number, unit, unit.forward)


def _away(config: ModelConfig) -> int:
    return config.cpu_offloading_num_layers if config.cpu_offloading else 0


def recompute_in_backward(unit: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``forward``, run again in backward; the buffers of ``unit`` change only once.

    It is a ``partial``, so that a deep copy of the unit runs its own forward.
    """
    return update_wrapper(partial(_recompute, unit, forward), forward)


def _recompute(unit: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _Recomputation(unit, current_forward())

    return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)


def _offloaded(
    offload: ActivationOffload, number: int, unit: nn.Module, forward: Callable[..., Any]
) -> Callable[..., Any]:
    def make(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: offload.run(number, partial(forward, *args, **kwargs), [unit])

    return DerivedForward(forward, make)


class _Recomputation:
    """Context of a forward in backward: it undoes changes of buffers, such as running statistics of batch norm.

    The first forward has made them already; each backward through the unit enters it once more. ``forward`` is the
    context of the first forward.
    """

    def __init__(self, module: nn.Module, forward: AbstractContextManager[Any]) -> None:
        self._module = module
        self._forward = forward
        self._before: list[tuple[Tensor, Tensor]] = []

    def __enter__(self) -> None:
        self._before = [(buffer, buffer.detach().clone()) for buffer in self._module.buffers()]
        self._forward.__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._forward.__exit__(*exception)
        for buffer, value in self._before:
            buffer.data.copy_(value)  # without a new version: autograd may have saved the buffer
        self._before = []
