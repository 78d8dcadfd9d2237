"""The optimizer and the scheduler of an engine: those of the program, else those of the JSON."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from deepspeed.ops.adam.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.ops.lion.lion import DeepSpeedCPULion, FusedLion
from deepspeed.ops.settings import SettingsOptimizer
from deepspeed.optimizers import momenta_of, muon_rates, torch_optimizer
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from deepspeed.translation import Translation
from deepspeed.utils.logging import log_dist
from megatron_core.any_model.arguments import check_scheduler_of, checked_groups, make_optimizer, scheduler_made_by
from megatron_core.any_model.scheduler import share_groups
from megatron_core.errors import ConfigError
from megatron_core.parallel.texts import listed

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

    def freeze_others(self, model: nn.Module) -> None:
        """Freeze parameters of ``model`` in no group, which DeepSpeed does not train either, and log their names."""
        entries = self.model_parameters if self.optimizer is None else self.optimizer.param_groups
        members = {member for entry in entries or () for member in _members(entry)}
        absent = {name: p for name, p in model.named_parameters() if p.requires_grad and p not in members}
        if absent and members <= set(model.parameters()):  # else the engine names the mistake
            for parameter in absent.values():
                parameter.requires_grad_(False)
            log_dist(f"not trained, because no parameter group has them: {listed(list(absent))}", ranks=[0])


def _members(entry: Any) -> list[nn.Parameter]:
    """Return the parameters of a group, or of an entry that is a parameter, or a name with one."""
    params = entry["params"] if isinstance(entry, Mapping) else [entry]
    return [member[1] if isinstance(member, tuple) else member for member in params]


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
        divided = _halves_of_muon(model, parameters, found.optimizer.params) if _is_muon(found) else parameters
        groups = _with_rates(divided, found.settings)
        settings = {"lr": found.settings["lr"] or LR}
        return ChosenOptimizer(settings, None, groups, client=_class_in_json(found, groups))
    trained = [p for p in parameters if isinstance(p, Mapping | tuple) or p.requires_grad]
    try:
        own = torch_optimizer(found.optimizer_class)(trained, **found.optimizer_params)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.params={found.optimizer_params!r} of {found.optimizer_class}: {error}; correct the parameters"
        ) from error
    return ChosenOptimizer(optimizer=own, client=own)


def _is_muon(found: Translation) -> bool:
    return found.settings.get("optimizer") == "muon"


def _halves_of_muon(model: nn.Module, parameters: list[Any], params: Mapping[str, Any]) -> list[Any]:
    """Return groups of either hidden matrices, which Muon updates, or other parameters, which Adam updates.

    DeepSpeed finds embedding and output layer by their names, and so does this function. Errors: ``ConfigError`` for
    kernels of convolutions, which DeepSpeed reshapes.
    """
    for name, parameter in model.named_parameters():
        is_end = any(word in name.lower() for word in ("embed", "lm_head"))
        vars(parameter).update(is_embedding_or_output_parameter=is_end, use_muon=parameter.dim() > 1 and not is_end)
        if parameter.dim() == 4 and parameter.requires_grad and not is_end:
            raise ConfigError(f"optimizer.type=Muon: {name} has 4 dimensions; use AdamW, or set requires_grad=False")
    entries = [entry if isinstance(entry, Mapping) else {"params": [entry]} for entry in parameters]
    groups = [entry for entry in entries if isinstance(entry["params"], list) and len(entry) > 1]
    loose = [member for entry in entries if len(entry) == 1 for member in entry["params"]]
    divided = []
    for group in (*groups, *([{"params": loose}] if loose else [])):
        members = _members(group)
        for is_matrix in (True, False):
            half = [p for p in members if p.requires_grad and vars(p)["use_muon"] is is_matrix]
            if half:
                rates = muon_rates(params, is_matrix=is_matrix)
                divided.append({**rates, **group, "params": half, "use_muon": is_matrix})
    return divided


def _class_in_json(found: Translation, groups: list[dict[str, Any]]) -> torch.optim.Optimizer | None:
    """Return the optimizer of DeepSpeed's class that the program sees; None: that of the engine."""
    assert found.optimizer is not None
    params = found.optimizer.params
    on_cpu = found.settings.get("optimizer_cpu_offload", False)
    name = found.optimizer.name.lower()
    # Copies: a torch optimizer adds its defaults to the groups that it is given, and these go to the engine.
    groups = [{"betas": momenta_of(found.settings), **group} for group in groups]
    if name in ("adam", "adamw"):
        decoupled = name == "adamw" or params.get("adam_w_mode", True)
        if params.get("torch_adam"):
            return (torch.optim.AdamW if decoupled else torch.optim.Adam)(groups)
        return DeepSpeedCPUAdam(groups, adamw_mode=decoupled) if on_cpu else FusedAdam(groups, adam_w_mode=decoupled)
    if name == "lion":
        return DeepSpeedCPULion(groups) if on_cpu else FusedLion(groups)
    return MuonWithAuxAdam(groups, {}) if name == "muon" else None


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
