"""Learning-rate schedulers and optimizers of the caller on the parameter groups of an engine."""

import inspect
from collections.abc import Callable, Mapping
from copy import copy
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from megatron_core.any_model.arguments import check_scheduler_of, scheduler_made_by
from megatron_core.errors import CheckpointError, ConfigError


def share_groups(client: torch.optim.Optimizer, engine: torch.optim.Optimizer) -> None:
    """Give the caller's optimizer the parameter groups of the engine's optimizer ``engine``.

    Schedulers of ``client``, also those inside of another scheduler, then change the settings that the engine reads.
    """
    if client.param_groups is not engine.param_groups:
        for group, theirs in zip(engine.param_groups, client.param_groups, strict=False):  # a stage may have none
            for name, value in theirs.items():
                group.setdefault(name, value)
        client.param_groups = engine.param_groups
    # Schedulers of torch warn if the optimizer's ``step`` was not called: the engine updates the weights itself.
    vars(client)["_opt_called"] = True


def replace_step(
    client: torch.optim.Optimizer,
    take_step: Callable[..., object],
    zero_grad: Callable[..., object],
    *,
    refuses_hooks: bool = False,
) -> None:
    """Let ``step()`` of the caller's optimizer, which has no gradients, call ``take_step``; likewise ``zero_grad``.

    Its ``state_dict`` and ``load_state_dict`` become errors, because the engine has the state; so do new groups.
    ``refuses_hooks``: also new hooks of ``step``, because the engine does not call the optimizer's own.
    """

    def step(*args: Any, **kwargs: Any) -> None:
        take_step(*args, **kwargs)

    vars(step)["_wrapped_by_lr_sched"] = True  # read by schedulers of torch, which wrap ``step`` otherwise
    vars(client)["zero_grad"] = zero_grad
    vars(client).update(step=step, state_dict=refuse_state, load_state_dict=refuse_state, add_param_group=refuse_group)
    if refuses_hooks:
        vars(client).update(register_step_pre_hook=refuse_hook, register_step_post_hook=refuse_hook)


def refuse_state(*args: Any, **kwargs: Any) -> NoReturn:
    """Refer to the checkpoint of the engine."""
    raise CheckpointError(
        "state_dict and load_state_dict of an optimizer of an engine: its state is in shards; use "
        "engine.save_checkpoint and engine.load_checkpoint"
    )


def refuse_group(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse a parameter group whose parameters the engine would not train."""
    raise ConfigError(
        "add_param_group after megatron_core.initialize: the engine would not train its parameters; give all groups "
        "to initialize, with a learning rate of 0 while they are not to be trained"
    )


def refuse_hook(*args: Any, **kwargs: Any) -> NoReturn:
    """Refuse a hook that the engine's step would not call."""
    raise ConfigError(
        "register_step_pre_hook and register_step_post_hook after megatron_core.initialize: engine.step() does not "
        "call hooks of an optimizer; register them before, or run their code around engine.step()"
    )


def make_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return ``scheduler``, or the result of ``scheduler(optimizer)`` if it is a function or a class.

    Errors: ``ConfigError`` without a ``step()``, if that needs an argument, and for a scheduler of another optimizer.
    """
    if scheduler is None:
        return None
    if isinstance(scheduler, type) or not hasattr(scheduler, "step"):
        scheduler = scheduler_made_by(scheduler, optimizer)
    check_scheduler_of(scheduler, optimizer)
    if needs_argument(scheduler.step):
        raise ConfigError(
            f"lr_scheduler={type(scheduler).__name__}: its step() needs an argument, which the engine does not have; "
            "leave out lr_scheduler, construct it with the optimizer, and call its step yourself"
        )
    return scheduler


def needs_argument(function: Callable[..., Any]) -> bool:
    """Whether ``function`` cannot be called without arguments."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return any(parameter.default is parameter.empty and parameter.kind in positional for parameter in parameters)


def plain_state(scheduler: Any) -> dict[str, Any]:
    """Return the state of a learning-rate scheduler as JSON values.

    Values that are not data, such as functions, are left out of mappings, and are None in lists.
    """
    state_dict = getattr(scheduler, "state_dict", None)
    return _plain(state_dict()) if callable(state_dict) else {}


def restore_state(scheduler: Any, stored: Mapping[str, Any]) -> None:
    """Load the result of ``plain_state``, with the types of keys and tuples in the present state.

    Values that are not data keep their present values.
    """
    scheduler.load_state_dict(_typed(stored, scheduler.state_dict()))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items() if _is_data(inner)}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, np.generic | Tensor) and _is_data(value):  # a learning rate may be a tensor
        return value.item()
    return value if _is_data(value) else None


def _is_data(value: Any) -> bool:
    """Whether ``value`` is a number, a text, None, or a container."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, Mapping | list | tuple | np.generic) or is_json(value)


def is_json(value: Any, *, any_key: bool = False) -> bool:
    """Whether ``value`` consists of JSON values and tuples; with ``any_key``, keys may be other values than texts."""
    if isinstance(value, Mapping):
        return all((any_key or isinstance(key, str)) and is_json(item, any_key=any_key) for key, item in value.items())
    if isinstance(value, list | tuple):
        return all(is_json(item, any_key=any_key) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


def _typed(stored: Any, present: Any) -> Any:
    """Return the JSON value ``stored`` with the types in ``present``: JSON has texts for keys, and lists for tuples."""
    if isinstance(stored, Mapping) and isinstance(present, Mapping):
        numbers = bool(present) and all(type(key) is int for key in present)
        values = {int(n) if numbers else n: _typed(v, present.get(n)) for n, v in stored.items()}
        values |= {n: v for n, v in present.items() if n not in values and not _is_data(v)}
        if not isinstance(present, dict):
            return values
        typed = copy(present)  # MultiStepLR has a Counter
        typed.clear()
        typed.update(values)
        return typed
    if isinstance(stored, list) and isinstance(present, list | tuple):
        same = len(stored) == len(present)
        items = [_typed(item, present[index] if same else None) for index, item in enumerate(stored)]
        return tuple(items) if type(present) is tuple else items
    return stored if stored is not None or _is_data(present) else present
