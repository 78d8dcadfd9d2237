"""Steps of torch's optimizers on the rows of DTensors: without DTensor's dispatch of every operation."""

from typing import Any

from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

ELEMENTWISE = frozenset(
    (
        *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD),
        *(optim.NAdam, optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD),
    )
)
"""Optimizers that update an element by its own gradient: steps on rows are steps on the whole tensor. Others, such as
Adafactor and Muon, run on the DTensors."""
MARK = "has_rows"
"""Attribute of the DTensors of ``fully_shard``; optimizers of other DTensors are left alone."""
_OPEN: Any = WeakIdKeyDictionary()
"""For each optimizer in a step its groups' parameters, and (DTensor, rows, state) of each exchanged parameter."""


def _begin_step(optimizer: Any, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Exchange the DTensors with gradients, and their state, by their rows."""
    # A closure computes the gradients of the DTensors, after this hook.
    has_closure = any(callable(value) for value in (*args[1:], *kwargs.values()))
    if type(optimizer) not in ELEMENTWISE or optimizer in _OPEN or has_closure:
        return
    exchanged: list[tuple[Any, nn.Parameter, dict[str, Any]]] = []
    listed = [group["params"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return
    for group, parameters in zip(optimizer.param_groups, listed, strict=True):
        group["params"] = [_exchange(optimizer, parameter, exchanged) for parameter in parameters]
    _OPEN[optimizer] = listed, exchanged


def _exchange(optimizer: Any, parameter: Any, exchanged: list[Any]) -> Any:
    """Return the rows of ``parameter`` as a parameter with its gradient and state."""
    if not hasattr(parameter, MARK) or parameter.grad is None:
        return parameter
    rows = nn.Parameter(parameter._local_tensor)
    rows.grad = parameter.grad._local_tensor
    state = optimizer.state.pop(parameter, {})
    if state:
        optimizer.state[rows] = {name: _rows_of(value) for name, value in state.items()}
    exchanged.append((parameter, rows, state))
    return rows


def _rows_of(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _end_step(optimizer: Any, args: object, kwargs: object) -> None:
    """Put the DTensors back, with new state as DTensors."""
    if optimizer not in _OPEN:
        return
    listed, exchanged = _OPEN.pop(optimizer)
    for group, parameters in zip(optimizer.param_groups, listed, strict=True):
        group["params"] = parameters
    for parameter, rows, before in exchanged:
        if rows in optimizer.state:
            state = optimizer.state.pop(rows)
            optimizer.state[parameter] = {
                name: before[name] if _rows_of(before.get(name)) is value else _whole(parameter, rows, value)
                for name, value in state.items()
            }


def _whole(parameter: Any, rows: Tensor, value: Any) -> Any:
    """Return state like the rows as a DTensor like the parameter; other state, such as counters, as it is."""
    if isinstance(value, Tensor) and value.dim() and value.shape == rows.shape:
        return DTensor(value, parameter._spec, requires_grad=False)
    return value


# Global hooks, because the optimizer is made after ``fully_shard``, by the program.
register_optimizer_step_pre_hook(_begin_step)
register_optimizer_step_post_hook(_end_step)
