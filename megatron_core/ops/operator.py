"""Register Python functions as torch operators, for torch.compile, torch.func and the profiler."""

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from operator import index
from typing import Any, NoReturn

import torch
from torch import Tensor

NUMBERS: dict[Any, Callable[[Any], Any]] = {float: float, int: index, float | None: float, int | None: index}
"""Conversion function of each annotation of a number."""


class Operator:
    """``torch.ops.megatron_core.<name>``, implemented by the decorated function.

    torch.compile uses the operator with the autograd rule of torch.library. A call with plain tensors runs the function
    directly, within an ``autograd.Function`` with the same rule unless in inference mode: the dispatcher would take
    another 20 us per call. Under torch.func's transforms, modes and the profiler, and for tensors that are not their
    memory, an ``autograd.Function`` calls the operator, because torch.func does not support the autograd rules of
    torch.library.
    """

    def __init__(self, implementation: Callable, name: str) -> None:
        self._signature = inspect.signature(implementation, eval_str=True)
        # Checked when the module is imported, not when a call first fails.
        if any(parameter.default is not parameter.empty for parameter in self._signature.parameters.values()):
            raise TypeError(f"operator {name} has default values, which autograd functions do not fill in")
        self._name = f"megatron_core::{name}"
        self._differentiable = True
        self._implementation = implementation
        self._operator = define(name)(implementation)
        kinds = enumerate(parameter.annotation for parameter in self._signature.parameters.values())
        # Convert numbers as the dispatcher does: C functions pass int64 and double in different registers.
        self._numbers = [(index_, NUMBERS[annotation]) for index_, annotation in kinds if annotation in NUMBERS]

    def register_fake(self, fake: Callable) -> None:
        """Register ``fake``, which allocates the outputs for the same arguments without computing them."""
        torch.library.register_fake(self._name, fake)

    def register_autograd(self, backward: Callable, setup_context: Callable) -> None:
        """Register ``backward(ctx, *gradients)`` and ``setup_context(ctx, inputs, output)``, which saves tensors."""
        torch.library.register_autograd(self._name, backward, setup_context=setup_context)

        def forward(*arguments: Any) -> Any:
            return self._operator(*arguments)

        def forward_of_memory(ctx: Any, *arguments: Any) -> Any:
            converted = self._converted(arguments)
            output = self._implementation(*converted)
            setup_context(ctx, converted, output)
            return output

        vars(forward)["__signature__"] = self._signature  # torch looks it up in every call
        methods: dict[str, object] = {
            "backward": staticmethod(backward),
            "jvp": staticmethod(self._refuse("has no forward-mode derivative; take kernel_backend='reference'")),
        }
        plain: dict[str, object] = {"forward": staticmethod(forward_of_memory)}
        general: dict[str, object] = {
            "forward": staticmethod(forward),
            "setup_context": staticmethod(setup_context),
            "generate_vmap_rule": True,
        }
        function: Any = type(self._name, (torch.autograd.Function,), methods | plain)
        self._apply = quick_apply(function)
        self._function: Any = type(self._name, (torch.autograd.Function,), methods | general)

    def register_no_autograd(self, instead: str = "for second derivatives take kernel_backend='reference'") -> None:
        """Make a derivative of the operator raise an error; its message contains the fix ``instead``."""
        self.register_autograd(self._refuse(f"has no backward; {instead}"), lambda ctx, inputs, output: None)
        self._differentiable = False

    def _refuse(self, reason: str) -> Callable:
        def refuse(ctx: object, *gradients: object) -> NoReturn:
            raise NotImplementedError(f"{self._name} {reason}")

        return refuse

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._operator(*arguments)
        # No graph is recorded, so not even an autograd.Function is needed.
        if torch.is_inference_mode_enabled():
            return self._implementation(*self._converted(arguments))
        # A backward operator in a plain backward pass: nothing would be recorded.
        direct = not (self._differentiable or torch.is_grad_enabled())
        if are_plain(arguments):
            return self._implementation(*self._converted(arguments)) if direct else self._apply(*arguments)
        return self._operator(*arguments) if direct else self._function.apply(*arguments)

    def _converted(self, arguments: Sequence[Any]) -> Sequence[Any]:
        if not self._numbers:
            return arguments
        converted = list(arguments)
        for index_, convert in self._numbers:
            if index_ < len(converted) and converted[index_] is not None:
                converted[index_] = convert(converted[index_])
        return converted


def quick_apply(function: Any) -> Callable[..., Any]:
    """``function.apply`` of an ``autograd.Function``, with less work outside of torch.func's transforms."""
    # ``Function.apply`` looks for tensors that have left a transform, 1 us for each call, and inspects the signature of
    # a function with a ``setup_context``, 30 us.
    plain = super(torch.autograd.Function, function).apply
    return lambda *inputs: (function.apply if torch._C._are_functorch_transforms_active() else plain)(*inputs)


def are_plain(arguments: Sequence[Any]) -> bool:
    """Whether all tensors are their memory, and no transform of torch.func, mode or profiler needs the dispatcher."""
    modes = torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack()  # such as a default device
    if modes or torch._C._are_functorch_transforms_active() or torch.autograd._profiler_enabled():
        return False
    for argument in arguments:
        if isinstance(argument, Tensor):
            # Faster than the device's type, of each tensor of each call.
            device_type = "cpu" if argument.is_cpu else argument.device.type
            if torch._C._dispatch_keys(argument) != _plain_keys(device_type):
                return False
    return True


@cache
def _plain_keys(device_type: str) -> Any:
    """The dispatch keys of a tensor on a device that is neither a subclass, nor a wrapper, nor negated when read; no
    keys if tensors there have no memory."""
    if device_type == "meta":
        return torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    return torch._C._dispatch_keys(torch.empty(0, device=device_type))


def operator(name: str) -> Callable[[Callable], Operator]:
    """Decorate a function to make it an operator with the types of its annotations; it must not mutate its inputs."""
    return lambda implementation: Operator(implementation, name)


def define(name: str, mutates_args: Sequence[str] = (), fake: Callable | None = None) -> Callable[[Callable], Any]:
    """Make the decorated function an operator with this name that mutates the arguments ``mutates_args``; ``fake``
    allocates its outputs, if it mutates arguments and has outputs.

    torch.library.custom_op is not used, because its first call imports torch._dynamo: 1.5 s per process.
    """

    def decorate(implementation: Callable) -> Any:
        full = f"megatron_core::{name}"
        names = list(inspect.signature(implementation).parameters)
        changed = [names.index(argument) for argument in mutates_args]

        def run(*arguments: Any) -> Any:
            result = implementation(*arguments)
            for index_ in changed:
                if arguments[index_] is None:
                    continue
                # torch.library does this only for functions registered by custom_op; without it autograd would not
                # notice the change.
                torch.autograd.graph.increment_version(arguments[index_])
            return result

        torch.library.define(full, torch.library.infer_schema(implementation, mutates_args=mutates_args))
        torch.library.impl(full, "CompositeExplicitAutograd", run if changed else implementation)
        if fake is not None or changed:
            torch.library.register_fake(full, fake or (lambda *arguments: None))
        return getattr(torch.ops.megatron_core, name).default

    return decorate
