"""Operators of torch made of Python functions, which calls reach past torch's dispatcher where nobody watches it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import NoneType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

TYPES = {"Tensor": (Tensor, torch.nn.Parameter), "float": (float,), "int": (int,), "bool": (bool,), "str": (str,)}
"""By a type of torch's schemas, those of Python that a body takes as they are. The dispatcher converts others, or
refuses them, and it is for tensors of other classes, such as fake ones."""

USUAL_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.BackendSelect).raw_repr() | (
    torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView).raw_repr()
)
"""What a thread adds to the dispatch keys of every call; modes, transforms and tracers add others."""


class Operator:
    """``torch.ops.megatron_core.<name>``, whose body is the decorated function, and a shorter way to the same.

    The operator is there for torch.compile, export and tracing, modes of dispatch as selective recomputation's,
    transforms as vmap, and the profiler (which therefore times the longer way). It would take 15 of a small call's 35
    microseconds forward, and 12 of 48 backward; all other calls run the function themselves.
    """

    def __init__(self, body: Callable, name: str) -> None:
        self._body, self._name = body, f"megatron_core::{name}"
        self._custom = torch.library.custom_op(self._name, body, mutates_args=())
        self._overload = getattr(torch.ops.megatron_core, name).default
        kinds = [str(argument.type) for argument in self._overload._schema.arguments]
        self._signatures = frozenset(itertools.product(*map(_types, kinds)))
        self._places = [i for i, kind in enumerate(kinds) if "Tensor" in kind]

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
        self._function = type(self._name, (torch.autograd.Function,), methods)

    def refuse_gradients(self, instead: str = "for second derivatives take backend='reference'") -> None:
        """Raise where a gradient would be needed: the operator has none; ``instead`` is the way out."""

        def refuse(ctx: object, inputs: tuple, output: object) -> NoReturn:
            raise NotImplementedError(f"{self._name} has no backward; {instead}")

        self.register_autograd(refuse, refuse)

    def __call__(self, *arguments: Any) -> Any:
        if forward_ad._current_level >= 0:
            self._refuse_tangents(arguments)
        if _watched() or tuple(map(type, arguments)) not in self._signatures:
            return self._overload(*arguments)
        tensors = [arguments[i] for i in self._places if arguments[i] is not None]
        if any(x.is_neg() or x._is_zerotensor() for x in tensors):  # their memory is not what they are
            return self._overload(*arguments)
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            return self._function.apply(*arguments)
        return self._body(*arguments)

    def _refuse_tangents(self, arguments: tuple) -> None:
        """Raise where a derivative would go forward through the operator: torch drops it without a word."""
        tensors = (x for x in arguments if isinstance(x, Tensor))
        if any(forward_ad.unpack_dual(x).tangent is not None for x in tensors):
            raise NotImplementedError(f"{self._name} has no forward-mode derivative; take backend='reference'")


def operator(name: str) -> Callable[[Callable], Operator]:
    """Decorate a function whose annotations are an operator's types and which changes none of its arguments."""
    return lambda body: Operator(body, name)


def _types(kind: str) -> tuple[type, ...]:
    """The types of Python for ``Tensor``, ``Optional[int]`` and the like."""
    given = TYPES[kind.removeprefix("Optional[").removesuffix("]")]
    return (*given, NoneType) if kind.startswith("Optional[") else given


def _watched() -> bool:
    """Whether somebody is to see operators rather than what they do."""
    return bool(
        torch.compiler.is_compiling()
        or torch._C._dispatch_tls_local_include_set().raw_repr() & ~USUAL_KEYS
        or torch._C._is_torch_function_mode_enabled()
        or torch.autograd._profiler_enabled()
    )
