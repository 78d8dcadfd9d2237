"""Megatron Core's names of experts: a parameter for each expert, in place of a stack of matrices."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.errors import ConfigError

GROUPED = "{linear}.{part}{number}"
"""Names of ``TEGroupedMLP``."""
SEQUENTIAL = "local_experts.{number}.{linear}.{part}"
"""Names of ``SequentialMLP``."""
_whole = ContextVar("whole", default=False)


class ExpertParameter(nn.Parameter):
    """One expert's part of a stack: a view of the stack, with the gradient and the attributes of this part.

    The stack is the parameter that is trained: its experts are frozen together. Until the last of them is frozen the
    stack is trained, and a forward with gradients raises ``ConfigError``.
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
        """Whether this expert is trained."""
        return bool(self.stack.requires_grad) and self.number not in _frozen(self.stack)

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        """Train this expert, or not."""
        frozen = _frozen(self.stack) - {self.number} if value else _frozen(self.stack) | {self.number}
        self.stack.requires_grad = len(frozen) < len(self.stack)
        self.stack.frozen_experts = frozen

    def requires_grad_(self, requires_grad: bool = True) -> "ExpertParameter":
        """Set ``requires_grad``."""
        self.requires_grad = requires_grad
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


def split_stacks(root: nn.Module, named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[tuple[str, nn.Parameter]]:
    """Replace each stack of experts in ``named``, parameters of ``root``, by those of its experts, numbered from 0 on
    this rank."""
    # Of modules and not of parameters: a copy of a parameter has no further attributes.
    names_of = {id(stack): names for module in root.modules() for _, stack, names in _stacks(module)}
    for name, parameter in named:
        names = names_of.get(id(parameter))
        if names is None:
            yield name, parameter
            continue
        outer = name.removesuffix(".".join(name.split(".")[-2:]))
        for number, inner in enumerate(names):
            yield outer + inner, ExpertParameter.of(parameter, number)


def pattern_of(experts: Any, *, grouped_gemm: bool) -> str | None:
    """The names of a layer's experts for the class ``experts`` in its specification, or None; None: those of stacks."""
    pattern: str | None = getattr(experts, "names_of_experts", None if grouped_gemm else SEQUENTIAL)
    return pattern


def name_experts(experts: nn.Module, pattern: str) -> None:
    """Name the parameters of ``experts`` by expert, in ``named_parameters`` of Megatron's modules and in
    ``state_dict``, which is also loaded with stacks. ``pattern``: ``GROUPED`` or ``SEQUENTIAL``."""
    experts.expert_pattern = pattern  # type: ignore[assignment]
    experts.register_state_dict_post_hook(_split_state)
    experts.register_load_state_dict_pre_hook(_stack_state)
    experts.register_forward_pre_hook(_check_frozen)


@contextmanager
def whole_stacks() -> Iterator[None]:
    """Within this context, ``state_dict`` has stacks."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def _stacks(experts: nn.Module) -> Iterator[tuple[str, nn.Parameter, list[str]]]:
    """Each stack in ``experts`` with its name, and the names of its experts; none in other modules."""
    pattern: str = vars(experts).get("expert_pattern", "")
    for linear, module in experts.named_children() if pattern else ():
        for part, stack in module.named_parameters(recurse=False):
            names = [pattern.format(linear=linear, part=part, number=number) for number in range(len(stack))]
            yield f"{linear}.{part}", stack, names


def _split_state(experts: nn.Module, state: dict[str, Any], prefix: str, metadata: Mapping[str, Any]) -> None:
    for name, _, names in () if _whole.get() else _stacks(experts):
        stack = state.pop(prefix + name)
        is_variable = isinstance(stack, nn.Parameter)
        for number, inner in enumerate(names):
            state[prefix + inner] = ExpertParameter.of(stack, number) if is_variable else stack[number]


def _stack_state(
    experts: nn.Module, state: dict[str, Any], prefix: str, _: Any, strict: bool, missing: list[str], *others: Any
) -> None:
    for name, stack, names in _stacks(experts):
        absent = [prefix + inner for inner in names if prefix + inner not in state]
        if len(absent) < len(names):
            missing.extend(absent)
            parts = zip(names, stack.detach(), strict=True)  # absent experts keep their weights
            state[prefix + name] = torch.stack([state.pop(prefix + inner, values) for inner, values in parts])


def _frozen(stack: Any) -> set[int]:
    """The numbers of the experts in ``stack`` that are not trained."""
    return vars(stack).get("frozen_experts", set()) if stack.requires_grad else {*range(len(stack))}


def _check_frozen(experts: nn.Module, inputs: Any) -> None:
    for name, stack, _ in _stacks(experts):
        frozen = _frozen(stack)
        if 0 < len(frozen) < len(stack) and torch.is_grad_enabled():
            raise ConfigError(
                f"requires_grad=False for experts {sorted(frozen)} of {len(stack)} in {name}: the experts of a rank "
                "are trained together; freeze all of them, or none"
            )
