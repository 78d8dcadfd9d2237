"""The engine's optimizer as a ``torch.optim.Optimizer``, and its settings from one that the caller made."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_core.config import OptimizerConfig
from megatron_core.errors import ConfigError

PER_GROUP = ("lr", "weight_decay", "eps")
"""Settings that each parameter group may have."""
Groups = list[dict[str, Any]]


class EngineOptimizer(torch.optim.Optimizer):
    """Parameter groups of an engine, for learning-rate schedulers and for reading.

    Each step of the engine reads ``lr``, ``weight_decay`` and ``eps`` of each group. Weights and moments belong to the
    engine's own optimizer, in shards.
    """

    def __init__(self, groups: Groups, take_step: Callable[[], object]) -> None:
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0, "eps": 1e-8})
        self._take_step = take_step

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """As ``Engine.step``."""
        if closure is not None:
            raise ConfigError("closure is not supported: an engine computes gradients once a step; leave it out")
        self._take_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do nothing: the engine clears its gradients after each step."""


def groups_of(module: nn.Module, config: OptimizerConfig, given: Iterable[Any] | None) -> Groups:
    """Return parameter groups of all trained parameters, each with ``lr``, ``weight_decay`` and ``eps``.

    ``given``: parameters, or dicts with ``params`` and settings, as for a torch optimizer; all of ``weight_decay``
    then applies to each. By default matrices and tables have weight decay, and vectors have none.
    """
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "eps": config.adam_eps}
    trained = {p: name for name, p in module.named_parameters() if p.requires_grad}
    if not trained:
        raise ConfigError(f"model={type(module).__name__} has no parameter with requires_grad=True; nothing to train")
    if given is None:
        by_decay = {decays: [p for p in trained if (p.dim() > 1) == decays] for decays in (True, False)}
        return [
            {**common, "weight_decay": config.weight_decay * decays, "params": params}
            for decays, params in by_decay.items()
            if params
        ]
    listed: Groups = [dict(each) if isinstance(each, Mapping) else {"params": [each]} for each in given]
    if not any("lr" in each or "weight_decay" in each for each in listed):
        listed = [{"params": [p for each in listed for p in _parameters(each["params"])]}]
    groups = []
    for each in listed:
        settings = {name: float(each[name]) for name in PER_GROUP if name in each}
        groups.append({**common, **settings, "params": [p for p in _parameters(each["params"]) if p.requires_grad]})
    _check_members(groups, trained)
    return [group for group in groups if group["params"]]


def _parameters(params: Any) -> Iterator[nn.Parameter]:
    for each in [params] if isinstance(params, nn.Parameter) else params:
        yield each[1] if isinstance(each, tuple) else each


def _check_members(groups: Groups, trained: Mapping[nn.Parameter, str]) -> None:
    """Raise ``ConfigError`` unless the groups contain exactly the trained parameters, each once."""
    members = [p for group in groups for p in group["params"]]
    foreign = sum(p not in trained for p in members)
    if foreign:
        raise ConfigError(
            f"optimizer: {foreign} of its {len(members)} parameters do not belong to the model; construct it from "
            "model.parameters() of the model that is given"
        )
    if len(set(members)) < len(members):
        raise ConfigError("optimizer: a parameter is in several groups; put it into one of them")
    absent = [name for p, name in trained.items() if p not in set(members)]
    if absent:
        raise ConfigError(
            f"optimizer: {absent[0]} and {len(absent) - 1} more trained parameters are in no group; add them, or set "
            "requires_grad=False"
        )


def settings_from(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> OptimizerConfig:
    """Translate a torch optimizer into settings; its parameter groups keep their own rates.

    Supported: AdamW, Adam without weight decay, SGD without dampening and Nesterov momentum. Errors: ``ConfigError``
    for another class, another option, and betas or momenta that differ between groups.
    """
    kind, defaults = type(optimizer).__name__, optimizer.defaults
    if isinstance(optimizer, torch.optim.Adam):  # AdamW is a subclass since torch 2.8
        decoupled = isinstance(optimizer, torch.optim.AdamW) or defaults.get("decoupled_weight_decay", False)
        decays = any(group["weight_decay"] for group in optimizer.param_groups)
        _refuse(kind, amsgrad=defaults["amsgrad"], maximize=defaults["maximize"])
        if decays and not decoupled:
            raise ConfigError("optimizer=Adam: its weight decay is a part of the gradient; use torch.optim.AdamW")
        beta1, beta2 = _common(optimizer, "betas")
        return replace(config, optimizer="adam", adam_beta1=float(beta1), adam_beta2=float(beta2))
    if isinstance(optimizer, torch.optim.SGD):
        _refuse(kind, dampening=defaults["dampening"], nesterov=defaults["nesterov"], maximize=defaults["maximize"])
        return replace(config, optimizer="sgd", sgd_momentum=float(_common(optimizer, "momentum")))
    raise ConfigError(
        f"optimizer={kind} cannot run on shards of flat parameters; use torch.optim.AdamW, Adam or SGD, or omit it and "
        "choose one with config['optimizer']"
    )


def _refuse(kind: str, **options: Any) -> None:
    for name, value in options.items():
        if value:
            raise ConfigError(f"optimizer={kind}: {name}={value} is not supported; leave it out")


def _common(optimizer: torch.optim.Optimizer, name: str) -> Any:
    values = {group[name] for group in optimizer.param_groups}
    if len(values) > 1:
        raise ConfigError(f"optimizer={type(optimizer).__name__}: {name} differs between groups; use one value")
    return values.pop()
