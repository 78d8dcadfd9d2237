"""Python functions as operators of torch that torch.compile, torch.func and the profiler know."""

import inspect
from collections.abc import Callable, Sequence
from operator import index
from typing import Any, NoReturn

import torch

NUMBERS: dict[Any, Callable[[Any], Any]] = {float: float, int: index, float | None: float, int | None: index}
"""Annotations of numbers -> their conversion."""


class Operator:
    """``torch.ops.megatron_core.<name>``, implemented by the decorated function.

    torch.compile takes the operator with the autograd rule of torch.library. In inference mode a call runs the
    function directly: the dispatcher and autograd cost 0.1 ms a call, as much as a kernel on 16 tokens. Every other
    call goes through an ``autograd.Function`` of the same rule, as torch.func's transforms refuse those of
    torch.library.
    """

    def __init__(self, implementation: Callable, name: str) -> None:
        self._name, self._differentiable = f"megatron_core::{name}", True
        self._implementation = implementation
        self._operator = define(name)(implementation)
        self._signature = inspect.signature(implementation, eval_str=True)
        kinds = enumerate(parameter.annotation for parameter in self._signature.parameters.values())
        # As the dispatcher does: a C function reads a number of another type from another register.
        self._numbers = [(at, NUMBERS[kind]) for at, kind in kinds if kind in NUMBERS]

    def register_fake(self, fake: Callable) -> None:
        """Give the function that makes outputs without computing them, from the same arguments."""
        torch.library.register_fake(self._name, fake)

    def register_autograd(self, backward: Callable, setup_context: Callable) -> None:
        """Give ``backward(ctx, *gradients)``, and ``setup_context(ctx, inputs, output)``, which keeps what it needs."""
        torch.library.register_autograd(self._name, backward, setup_context=setup_context)

        def forward(*arguments: Any) -> Any:
            return self._operator(*arguments)

        vars(forward)["__signature__"] = self._signature  # which torch looks up in every call
        methods: dict[str, object] = {
            "forward": staticmethod(forward),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
            "jvp": staticmethod(self._refuse("has no forward-mode derivative; take kernel_backend='reference'")),
            "generate_vmap_rule": True,
        }
        self._function: Any = type(self._name, (torch.autograd.Function,), methods)

    def register_no_autograd(self, instead: str = "for second derivatives take kernel_backend='reference'") -> None:
        """Make a derivative of the operator an error that says ``instead``, the way out."""
        self.register_autograd(self._refuse(f"has no backward; {instead}"), lambda ctx, inputs, output: None)
        self._differentiable = False

    def _refuse(self, reason: str) -> Callable:
        def refuse(ctx: object, *gradients: object) -> NoReturn:
            raise NotImplementedError(f"{self._name} {reason}")

        return refuse

    def __call__(self, *arguments: Any) -> Any:
        if torch.compiler.is_compiling():
            return self._operator(*arguments)
        if torch.is_inference_mode_enabled():
            given = list(arguments)
            for at, convert in self._numbers:
                if at < len(given) and given[at] is not None:
                    given[at] = convert(given[at])
            return self._implementation(*given)
        direct = not (self._differentiable or torch.is_grad_enabled())
        return self._operator(*arguments) if direct else self._function.apply(*arguments)


def operator(name: str) -> Callable[[Callable], Operator]:
    """Decorate a function whose annotations are an operator's types and which changes none of its arguments."""
    return lambda implementation: Operator(implementation, name)


def define(name: str, mutates_args: Sequence[str] = ()) -> Callable[[Callable], Any]:
    """Make the decorated function an operator of this name, which changes the arguments ``mutates_args`` in place.

    Not torch.library.custom_op, whose first call imports torch._dynamo: 1.5 s of every process.
    """

    def decorate(implementation: Callable) -> Any:
        full, names = f"megatron_core::{name}", list(inspect.signature(implementation).parameters)
        changed = [names.index(argument) for argument in mutates_args]

        def run(*arguments: Any) -> Any:
            result = implementation(*arguments)
            for at in changed:
                torch.autograd.graph.increment_version(arguments[at])
            return result

        torch.library.define(full, torch.library.infer_schema(implementation, mutates_args=mutates_args))
        torch.library.impl(full, "CompositeExplicitAutograd", run if changed else implementation)
        if changed:
            torch.library.register_fake(full, lambda *arguments: None)
        return getattr(torch.ops.megatron_core, name).default

    return decorate
