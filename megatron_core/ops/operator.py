"""Operators of torch made of Python functions, which calls reach past torch's dispatcher where nobody watches it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

PLAIN = frozenset({Tensor, torch.nn.Parameter})
"""The classes of tensors with memory of their own; others, as fake ones, are for the dispatcher."""


class Operator:
    """``torch.ops.megatron_core.<name>``, whose body is the decorated function, and a shorter way to the same.

    The operator is there for those that look at operators: torch.compile and torch.export, modes of dispatch as
    selective recomputation's, vmap, and the profiler. It would take 15 of a small call's 35 microseconds forward, and
    12 of 48 backward; all other calls run the function themselves. Both ways compute and keep the same.
    """

    def __init__(self, body: Callable, name: str) -> None:
        self._body = body
        self._custom = torch.library.custom_op(f"megatron_core::{name}", body, mutates_args=())
        self._overload = getattr(torch.ops.megatron_core, name).default

    def register_fake(self, fake: Callable) -> None:
        """Give the function that makes outputs without computing them, from the same arguments."""
        self._custom.register_fake(fake)

    def register_autograd(self, backward: Callable, setup_context: Callable) -> None:
        """Give ``backward(ctx, *gradients)``, and ``setup_context(ctx, inputs, output)``, which keeps what it needs."""
        self._custom.register_autograd(backward, setup_context=setup_context)

        def forward(ctx: Any, *arguments: Any) -> Any:
            output = self._body(*arguments)
            setup_context(ctx, arguments, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._function = type(self._custom._qualname, (torch.autograd.Function,), methods)

    def refuse_gradients(self, instead: str = "for second derivatives take backend='reference'") -> None:
        """Raise where a gradient would be needed: the operator has none; ``instead`` is the way out."""

        def refuse(ctx: object, inputs: tuple, output: object) -> NoReturn:
            raise NotImplementedError(f"{self._custom._qualname} has no backward; {instead}")

        self.register_autograd(refuse, refuse)

    def __call__(self, *arguments: Any) -> Any:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        if _watched() or not PLAIN.issuperset(map(type, tensors)):
            return self._overload(*arguments)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self._function.apply(*arguments)
        return self._body(*arguments)


def operator(name: str) -> Callable[[Callable], Operator]:
    """Decorate a function whose annotations are an operator's types and which changes none of its arguments."""
    return lambda body: Operator(body, name)


def _watched() -> bool:
    """Whether somebody is to see operators rather than what they do."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
        or torch.autograd._profiler_enabled()
    )
