"""Support for torch.compile: the collectives of a graph, and modules whose forward is another one.

A graph contains the collectives as operators without a visible body, so that ``reports.meter`` and the flight recorder
also see them, and the ranks start them in one order. All ranks of a group compile the same graph.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _resolve_process_group

GRAPHS = 64
"""Number of graphs of a forward after which torch.compile stops compiling, for windows, shapes and evaluation. torch's
default of 8 is meant for one module, but all layers have the same code."""


def group_named(name: str) -> dist.ProcessGroup:
    """The group with this ``group_name``."""
    return _resolve_process_group(cast(Any, name))


class CollectiveOperator:
    """``torch.ops.megatron_core.collective``, implemented by ``run(x, group_name, name, adjoint, ranks)``.

    ``name`` is a key of ``collectives.COLLECTIVES``; the backward is the collective ``adjoint``, whose own backward is
    ``name``.
    """

    def __init__(self, run: Callable[[Tensor, str, str, str, int], Tensor]) -> None:
        full = "megatron_core::collective"
        torch.library.define(full, "(Tensor x, str group, str name, str adjoint, int ranks) -> Tensor")
        # One implementation for all devices: the collective itself dispatches by device.
        torch.library.impl(full, "CompositeExplicitAutograd", run)
        torch.library.register_fake(full, _fake)
        torch.library.register_autograd(full, self._backward, setup_context=_save)
        self._operator = torch.ops.megatron_core.collective.default

    def __call__(self, x: Tensor, group: dist.ProcessGroup, name: str, adjoint: str) -> Tensor:
        """Apply the collective ``name`` over ``group``, which has more than one rank."""
        return self._operator(x, group.group_name, name, adjoint, group.size())

    def _backward(self, ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        group, name, adjoint, ranks = ctx.of
        # The identity does not call an operator: the output of an operator must not be its input, so it would copy.
        dx = dy if adjoint == "identity" else self._operator(dy, group, adjoint, name, ranks)
        return dx, None, None, None, None


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *ctx.of = inputs


def _fake(x: Tensor, group: str, name: str, adjoint: str, ranks: int) -> Tensor:
    shape = list(x.shape)
    dim = -1 if name.endswith("_last") else 0
    if name.startswith("gather"):
        shape[dim] *= ranks
    elif name.startswith(("split", "reduce_scatter")):
        shape[dim] //= ranks
    return x.new_empty(shape)


class DerivedForward:
    """A ``forward`` that ``make`` derives from the module's own; in a deep copy of the module from the copy's."""

    def __init__(self, forward: Callable[..., Any], make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._own = forward
        self._make = make
        self._call = make(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> "DerivedForward":
        return DerivedForward(deepcopy(self._own, memo), self._make)  # a method of the copy, which ``memo`` has


def runs_graphs(module: nn.Module) -> bool:
    """Whether the module's forward is compiled, or runs by CUDA graphs."""
    return getattr(module, "has_graphs", False)


def is_compiled(module: nn.Module) -> bool:
    """Whether a program has compiled the module, by ``torch.compile(module)`` or ``module.compile()``."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None


def outside_of_graphs(module: nn.Module) -> Iterator[nn.Module]:
    """Yield ``module`` and its submodules, without those inside of a module with graphs: these run no hooks."""
    yield module
    for child in () if runs_graphs(module) else module.children():
        yield from outside_of_graphs(child)
