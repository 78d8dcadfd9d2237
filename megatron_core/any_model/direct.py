"""Calls of a program that bypass its engine: ``loss.backward()``, detected by hooks, and ``module.zero_grad()``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_core.any_model.data import loss_of
from megatron_core.data_parallel.fill import tensors_in
from megatron_core.errors import ConfigError


class DirectBackward:
    """Calls ``begin()`` before a backward that reaches the outputs of a forward, and ``end(loss)`` after it.

    ``loss`` is the detached loss among the outputs, None if there is none. Not detected: backwards inside of
    ``engine.backward``, and backwards that compute only selected gradients (``torch.autograd.grad``).
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], begin: Callable[[], None], end: Callable[[Tensor | None], None]
    ) -> None:
        self._parameters = list(parameters)
        self._begin = begin
        self._end = end
        self._begin_unseen = begin
        self.is_running = False
        """Whether a backward runs, of the engine or of the program."""

    def watch(self, output: Any) -> None:
        """Register hooks on the tensors in ``output``."""
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        loss = _detached_loss(output) if tensors else None
        for tensor in tensors:
            tensor.register_hook(partial(self._enter, loss))

    def watch_parameters(self, begin: Callable[[], None]) -> list[RemovableHandle]:
        """Return hooks on the parameters: ``begin()`` is called if a backward reaches no output of a forward."""
        self._begin_unseen = begin
        reference = weakref.ref(self)  # the garbage collector does not see the references of these hooks
        return [p.register_hook(partial(_enter_at, reference, number)) for number, p in enumerate(self._parameters)]

    def _enter(self, loss: Tensor | None, grad: Tensor) -> None:
        if not self.is_running and any(map(_accumulates, self._parameters)):
            self._start(loss, self._begin)

    def _start(self, loss: Tensor | None, begin: Callable[[], None]) -> None:
        begin()
        self.is_running = True
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._leave, loss))

    def _leave(self, loss: Tensor | None) -> None:
        self.is_running = False
        self._end(loss)


def _enter_at(reference: weakref.ref[DirectBackward], number: int, grad: Tensor) -> None:
    direct = reference()
    if direct is not None and not direct.is_running and _accumulates(direct._parameters[number]):
        direct._start(None, direct._begin_unseen)


def _accumulates(parameter: nn.Parameter) -> bool:
    """Whether the running backward adds a gradient to ``parameter.grad``."""
    with torch.enable_grad(), torch._C.DisableTorchFunctionSubclass():
        view = parameter.view_as(parameter)
    node: Any = None if view.grad_fn is None else view.grad_fn.next_functions[0][0]
    try:
        is_reached: bool = torch._C._will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad returns this gradient
        return False
    return is_reached


def _detached_loss(output: Any) -> Tensor | None:
    try:
        loss = loss_of(output).detach()
    except ConfigError:
        return None
    return loss if loss.numel() == 1 else None


class ZeroGrad:
    """Replaces ``zero_grad`` of one module; copies of the module, which no engine trains, have the method itself."""

    def __init__(self, module: nn.Module, discard: Callable[[], object], give_back: Callable[[], None]) -> None:
        self._module = module
        self._discard = discard
        self.give_back = give_back

    def __call__(self, set_to_none: bool = True) -> None:
        """Call the module's own method, and discard the gradients of the engine."""
        type(self._module).zero_grad(self._module, set_to_none)
        self._discard()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = memo[id(self._module)]
        return MethodType(type(copied).zero_grad, copied)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._module, "zero_grad")


def attach_to(module: nn.Module, discard: Callable[[], object], give_back: Callable[[], None]) -> None:
    """Let ``module.zero_grad()`` call ``discard()``, too, and ``detach_engine(module)`` call ``give_back()``."""
    cast(Any, module).zero_grad = ZeroGrad(module, discard, give_back)


def detach_engine(module: nn.Module) -> None:
    """Undo what an earlier engine has done to ``module``.

    A program may construct engines one after the other, as the Trainer of transformers does to find a batch that fits.
    The hooks of the first would add gradients to buffers of the second, whose memory they have not allocated.
    """
    former = vars(module).get("zero_grad")
    if isinstance(former, ZeroGrad):
        former.give_back()
        del module.zero_grad
