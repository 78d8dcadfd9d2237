"""Names of Transformer Engine's grouped experts: a parameter for each expert, in place of a stack of matrices."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_PARTS = ("weight", "bias")
_whole = ContextVar("whole", default=False)


class ExpertParameter(nn.Parameter):
    """One expert's part of a stack: a view of the stack, with the gradient and the attributes of this part.

    The stack is the parameter that is trained: ``requires_grad`` is that of all its experts.
    """

    stack: Any
    number: int

    @classmethod
    def of(cls, stack: Any, number: int) -> "ExpertParameter":
        """Return the part of expert ``number``. It is connected to ``stack``, so that a loss of weights reaches it."""
        part: ExpertParameter = stack[number].as_subclass(cls)
        part.stack, part.number = stack, number
        return part

    is_leaf = True  # optimizers accept it

    @property
    def requires_grad(self) -> bool:
        """Whether the stack is trained."""
        return bool(self.stack.requires_grad)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Train the whole stack, or not."""
        self.stack.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> "ExpertParameter":
        """Set ``requires_grad``."""
        self.stack.requires_grad = requires_grad
        return self

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this expert."""
        return None if self.stack.grad is None else self.stack.grad[self.number]

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        """Set the gradient of this expert; None removes that of the stack."""
        if value is None:
            self.stack.grad = None
            return
        if self.stack.grad is None:
            self.stack.grad = torch.zeros_like(self.stack)
        self.stack.grad[self.number] = value

    @property
    def main_grad(self) -> Tensor:
        """The accumulated gradient of this expert."""
        gradient: Tensor = self.stack.main_grad[self.number]
        return gradient

    @property
    def data(self) -> Tensor:
        """The values, without a gradient."""
        values: Tensor = self.stack.data[self.number]
        return values

    @data.setter
    def data(self, value: Tensor) -> None:
        """Copy ``value`` into the stack."""
        self.stack.data[self.number] = value

    @property
    def partition_dim(self) -> int:
        """The dim that is split over expert-tensor-parallel ranks."""
        return int(self.stack.partition_dim) - 1

    def __getattr__(self, name: str) -> Any:
        """An attribute of the stack, such as ``allreduce``."""
        return getattr(self.stack, name)


def split_stacks(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Replace each stack of experts in ``named`` by the parameters of its experts, numbered from 0 on this rank."""
    for name, parameter in named:
        if getattr(parameter, "is_stack_of_experts", False):
            yield from ((f"{name}{index}", ExpertParameter.of(parameter, index)) for index in range(len(parameter)))
        else:
            yield name, parameter


def name_experts(linear: nn.Module) -> None:
    """Name the parameters of a grouped product by expert, in ``named_parameters`` of Megatron's modules and in
    ``state_dict``, which is also loaded with a stack."""
    for parameter in linear.parameters():
        parameter.is_stack_of_experts = True  # type: ignore[attr-defined]
    linear.register_state_dict_post_hook(_split_state)
    linear.register_load_state_dict_pre_hook(_stack_state)


@contextmanager
def whole_stacks() -> Iterator[None]:
    """Within this context, ``state_dict`` has stacks."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def _split_state(linear: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    for name in () if _whole.get() else _PARTS:
        stack = state.pop(prefix + name, None)
        for index in range(0 if stack is None else len(stack)):
            is_variable = isinstance(stack, nn.Parameter)
            state[f"{prefix}{name}{index}"] = ExpertParameter.of(stack, index) if is_variable else stack[index]


def _stack_state(linear: nn.Module, state: dict[str, Any], prefix: str, *others: Any) -> None:
    for name in _PARTS:
        count = 0 if (own := getattr(linear, name)) is None else len(own)
        names = [f"{prefix}{name}{index}" for index in range(count)]
        if names and all(each in state for each in names):
            state[prefix + name] = torch.stack([state.pop(each) for each in names])
