"""Calls of a program that bypass its engine: ``loss.backward()``, detected by hooks, and ``module.zero_grad()``."""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from megatron_core.any_model.data import loss_of
from megatron_core.data_parallel.fill import tensors_in
from megatron_core.errors import ConfigError


@dataclass(eq=False)
class DirectBackward:
    """Calls ``begin()`` before a backward that adds gradients to the parameters, and ``end(loss)`` after it.

    ``loss`` is the detached loss among the outputs of a forward, None if there is none. Not detected: backwards before
    the parameters are watched, inside of ``engine.backward``, and of selected gradients (``torch.autograd.grad``).
    """

    parameters: Sequence[nn.Parameter]
    begin: Callable[[], None]
    end: Callable[[Tensor | None], None]
    hooks: list[RemovableHandle]
    """Receives the hooks on the parameters."""
    begin_unseen: Callable[[], None] | None = None
    """Called in place of ``begin`` if a backward reaches a parameter before the outputs of a forward."""
    watched: set[nn.Parameter] = field(default_factory=set)
    is_running = False
    """Whether a backward runs, of the engine or of the program."""
    _loss: Tensor | None = None

    def watch(self, output: Any) -> None:
        """Register hooks on the tensors in ``output``, and once on each parameter."""
        # A loss may read a parameter itself, such as a temperature, whose gradient may precede those of outputs.
        self.watch_parameters()
        tensors = [tensor for tensor in tensors_in(output) if tensor.grad_fn is not None]
        loss = _detached_loss(output) if tensors else None
        for tensor in tensors:
            tensor.register_hook(partial(self._enter, loss))

    def watch_parameters(self) -> None:
        """Register a hook on each parameter that is trained and has none."""
        reference = weakref.ref(self)  # the garbage collector does not see the references of these hooks
        for parameter in self.parameters:
            if parameter.requires_grad and parameter not in self.watched:
                self.watched.add(parameter)
                self.hooks.append(parameter.register_hook(partial(_enter_at_parameter, reference)))

    def _enter(self, loss: Tensor | None, grad: Tensor) -> None:
        self._start(loss, self.begin)

    def _start(self, loss: Tensor | None, begin: Callable[[], None]) -> None:
        if not self.is_running:
            if not any(map(_accumulates, self.parameters)):
                return
            begin()
            self.is_running = True
            self._loss = None
            torch.autograd.Variable._execution_engine.queue_callback(self._leave)
        self._loss = loss if self._loss is None else self._loss

    def _leave(self) -> None:
        self.is_running = False
        self.end(self._loss)


def _enter_at_parameter(reference: weakref.ref[DirectBackward], grad: Tensor) -> None:
    direct = reference()
    if direct is not None:
        direct._start(None, direct.begin_unseen or direct.begin)


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


@dataclass(eq=False)
class ZeroGrad:
    """Replaces ``zero_grad`` of one module; copies of the module, which no engine trains, have the method itself."""

    _module: nn.Module
    _discard: Callable[[], object]
    give_back: Callable[[], None]

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
