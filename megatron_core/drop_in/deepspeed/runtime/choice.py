"""The optimizer and the scheduler of an engine: those of the program, else those of the JSON."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.ops.adam.adam import FusedAdam
from deepspeed.ops.settings import SettingsOptimizer
from deepspeed.runtime import lr_schedules
from deepspeed.translation import Translation
from megatron_core.any_model.arguments import check_scheduler_of, checked_groups, make_optimizer, scheduler_made_by
from megatron_core.any_model.scheduler import share_groups
from megatron_core.errors import ConfigError

LR = 1e-3
"""Setting of the engine where the JSON has no rate, or 0 before a schedule; the rates of the groups count."""


@dataclass
class ChosenOptimizer:
    """Arguments of ``megatron_core.initialize``."""

    settings: dict[str, Any] = field(default_factory=dict)
    """In addition to those of the JSON."""
    optimizer: torch.optim.Optimizer | None = None
    model_parameters: list[Any] | None = None
    trains: bool = True
    """Whether there is an optimizer at all; an engine without one only runs forward."""
    client: torch.optim.Optimizer | None = None
    """The optimizer that the program sees."""

    def share_groups(self, own: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Give the program's optimizer the parameter groups of the engine's; return the one that the program sees.

        A scheduler of the program's optimizer then changes the engine's learning rates.
        """
        if self.client is None:
            return own
        share_groups(self.client, own)
        return self.client


def choose_optimizer(
    model: nn.Module, client: Any, model_parameters: Iterable[Any] | None, found: Translation
) -> ChosenOptimizer:
    """Return the program's optimizer, or the one of the JSON on ``model_parameters`` (default: all).

    ``client``: an optimizer, or a function that makes one of a list of parameters. Errors: ``ConfigError``.
    """
    parameters = checked_groups(model_parameters) or list(model.parameters())
    if client is not None:
        client = make_optimizer(client, parameters)
    if isinstance(client, SettingsOptimizer):
        return ChosenOptimizer(client.settings(), None, client.param_groups, client=client)
    if client is not None:
        return ChosenOptimizer(client.settings() if isinstance(client, FusedAdam) else {}, client, client=client)
    if found.optimizer is None:
        return ChosenOptimizer({"optimizer": "sgd", "lr": LR}, None, parameters, trains=False)
    if found.optimizer_class is None:
        return ChosenOptimizer({"lr": found.settings["lr"] or LR}, None, _with_rates(parameters, found.settings))
    trained = [p for p in parameters if isinstance(p, Mapping | tuple) or p.requires_grad]
    try:
        own = getattr(torch.optim, found.optimizer_class)(trained, **found.optimizer_params)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.params={found.optimizer_params!r} of {found.optimizer_class}: {error}; correct the parameters"
        ) from error
    return ChosenOptimizer(optimizer=own, client=own)


def _with_rates(parameters: list[Any], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return parameter groups with the rates of the JSON, unless they have their own."""
    rates = {name: settings[name] for name in ("lr", "weight_decay")}
    groups = [each for each in parameters if isinstance(each, Mapping)]
    return [{**rates, **each} for each in groups] if groups else [{**rates, "params": parameters}]


def choose_scheduler(optimizer: torch.optim.Optimizer | None, client: Any, found: Translation) -> Any:
    """Return the program's scheduler, or the one of the JSON; None without both.

    ``client``: a scheduler, or a function that makes one of an optimizer. Errors: ``ConfigError`` for an unknown name
    or wrong arguments.
    """
    if client is not None:
        if optimizer is None:
            raise ConfigError("lr_scheduler without an optimizer: give one to deepspeed.initialize or in the JSON")
        if callable(client) or not hasattr(client, "step"):
            client = scheduler_made_by(client, optimizer)
        check_scheduler_of(client, optimizer)
        return client
    if found.scheduler is None or optimizer is None:
        return None
    name, params = found.scheduler
    kind: Callable[..., Any] | None = None
    if name in lr_schedules.VALID_LR_SCHEDULES:
        kind = getattr(lr_schedules, name)
    elif name.isidentifier() and not name.startswith("_"):
        kind = getattr(torch.optim.lr_scheduler, name, None)
    if not isinstance(kind, type):
        raise ConfigError(
            f"scheduler.type={name!r} is not a scheduler: use one of {', '.join(lr_schedules.VALID_LR_SCHEDULES)}, or "
            "a class of torch.optim.lr_scheduler"
        )
    try:
        if name not in lr_schedules.VALID_LR_SCHEDULES:  # which check their own arguments
            _check_types(kind, params)
        return kind(optimizer, **params)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise ConfigError(f"scheduler.params={params!r} of {name}: {error}") from error


def _check_types(kind: type, params: Mapping[str, Any]) -> None:
    """TypeError if an argument has another type than the class declares; torch would fail in a later step."""
    declared = inspect.signature(kind).parameters
    for name, value in params.items():
        wanted = declared[name].annotation if name in declared else None
        wanted = getattr(wanted, "__name__", wanted)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_right = {
            "int": is_number and float(value).is_integer(),
            "float": is_number,
            "bool": isinstance(value, bool),
            "str": isinstance(value, str),
        }
        if not is_right.get(str(wanted), True):
            raise TypeError(f"{name}={value!r} must be of the type {wanted}")
