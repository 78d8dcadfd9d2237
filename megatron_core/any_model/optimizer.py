"""The engine's optimizer as a ``torch.optim.Optimizer``, and its settings from one that the caller made."""

import inspect
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from megatron_core.any_model.scheduler import refuse_group, refuse_hook, refuse_state
from megatron_core.any_model.torch_optimizer import (
    STEP_HOOKS,
    TorchOptimizer,
    coupling_of,
    needs_closure,
    register_class,
)
from megatron_core.config import OptimizerConfig, ParallelConfig, RunConfig
from megatron_core.data_parallel import DataParallel
from megatron_core.errors import ConfigError
from megatron_core.features.sgd_and_lion.settings import MomentumConfig
from megatron_core.optimizer.loss_scale import make_loss_scale
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.parallel import ParallelGroups

PER_GROUP = ("lr", "weight_decay", "eps")
"""Settings of parameter groups that are numbers."""
OPTIONS = ("amsgrad", "maximize", "dampening", "nesterov")
"""Options of torch's Adam and SGD that the fused kernels lack."""
Groups = list[dict[str, Any]]


class EngineOptimizer(torch.optim.Optimizer):
    """Parameter groups of an engine, for learning-rate schedulers and for reading.

    Each step of the engine reads ``lr``, ``weight_decay``, ``eps``, and ``betas`` or ``momentum`` of each group.
    Weights and moments belong to the engine's own optimizer, in shards.
    """

    _opt_called = True
    """Read by schedulers of torch, which warn if ``step`` below was not called: programs call the engine's."""

    def __init__(self, groups: Groups, take_step: Callable[[], object], discard: Callable[[], object]) -> None:
        momenta: dict[str, Any] = {name: groups[0][name] for name in ("betas", "momentum") if name in groups[0]}
        # Some schedulers read the rate in ``defaults`` (transformers' polynomial one).
        super().__init__(groups, {"lr": groups[0].get("lr", 0.0), "weight_decay": 0.0, "eps": 1e-8, **momenta})
        self._take_step = take_step
        self._discard = discard

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """As ``Engine.step``."""
        if closure is not None:
            raise ConfigError("closure is not supported: an engine computes gradients once a step; remove it")
        self._take_step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``Engine.zero_grad``."""
        self._discard()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group in the constructor; later an error."""
        if hasattr(self, "_take_step"):
            refuse_group()
        super().add_param_group(param_group)

    # The engine calls no hooks of this class, and its state is in shards.
    register_step_pre_hook: Any = refuse_hook
    register_step_post_hook: Any = refuse_hook
    state_dict: Any = refuse_state
    load_state_dict: Any = refuse_state


def groups_of(
    module: nn.Module,
    config: OptimizerConfig,
    choice: Iterable[Any] | None,
    *,
    keeps_all: bool = False,
    trains: bool = True,
) -> Groups:
    """Return parameter groups of all trained parameters, each with ``lr``, ``weight_decay``, ``eps`` (and ``betas`` of
    Adam, ``momentum`` of SGD).

    ``choice``: parameters, or dicts with ``params`` and settings, as for a torch optimizer; all of ``weight_decay``
    then applies to each, and further entries are kept, as are groups without trained parameters: schedulers have a
    rate for each group. By default matrices and tables have weight decay, and vectors have none. ``keeps_all``: add no
    settings to those of ``choice``. ``trains``: an error if there are no trained parameters.
    """
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "eps": config.adam_eps}
    if config.optimizer == "adam":
        common["betas"] = config.adam_beta1, config.adam_beta2
    elif config.optimizer == "sgd":
        common["momentum"] = config.section(MomentumConfig).sgd_momentum
    trained = {p: name for name, p in module.named_parameters() if p.requires_grad}
    if trains and not trained:
        raise ConfigError(f"model={type(module).__name__} has no parameter with requires_grad=True; nothing to train")
    for parameter, name in trained.items():
        if parameter.is_complex():
            raise ConfigError(
                f"{name} is {parameter.dtype}: complex parameters cannot be trained; store the result of "
                "torch.view_as_real, and call torch.view_as_complex in forward"
            )
    by_memory: dict[int, str] = {}
    for parameter, name in trained.items():
        is_plain = type(parameter.data) is torch.Tensor and not parameter.is_meta and parameter.numel()
        if is_plain and (first := by_memory.setdefault(parameter.data_ptr(), name)) != name:
            raise ConfigError(
                f"{first} and {name} are two parameters in the same memory, which an engine would separate; register "
                "one parameter in both modules"
            )
    if choice is None:
        by_decay = {decays: [p for p in trained if (p.dim() > 1) == decays] for decays in (True, False)}
        return [
            {**common, "weight_decay": config.weight_decay * decays, "params": params}
            for decays, params in by_decay.items()
            if params
        ]
    items = list(choice)
    if not any(isinstance(entry, Mapping) for entry in items):
        items = [{"params": items}]
    groups: Groups = []
    listed: Groups = [dict(entry) if isinstance(entry, Mapping) else {"params": [entry]} for entry in items]
    for entry in listed:
        params = {"params": [p for p in _parameters(entry["params"]) if p.requires_grad]}
        settings = {} if keeps_all else {name: float(entry[name]) for name in PER_GROUP if name in entry}
        groups.append({**({} if keeps_all else common), **entry, **settings, **params})
    _check_members(groups, trained)
    return groups


def _parameters(params: Any) -> Iterator[nn.Parameter]:
    for entry in [params] if isinstance(params, nn.Parameter) else params:
        yield entry[1] if isinstance(entry, tuple) else entry


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


def check_trained(module: nn.Module, trained: Container[nn.Parameter]) -> None:
    """Raise ``ConfigError`` if parameters were added, frozen or unfrozen since ``initialize`` found ``trained``."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter not in trained:
            raise ConfigError(
                f"{name} has requires_grad=True, but was frozen or absent in megatron_core.initialize, so it is "
                "not trained; add and unfreeze parameters before initialize"
            )
        if not parameter.requires_grad and parameter in trained:
            raise ConfigError(
                f"{name} has requires_grad=False since megatron_core.initialize, but weight decay and momentum would "
                "change it; freeze it before initialize, or set the learning rate of its parameter group to 0"
            )


def settings_from(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> OptimizerConfig | None:
    """Translate a torch optimizer into settings; its parameter groups keep their own rates.

    Known: AdamW, Adam without weight decay, SGD without dampening and Nesterov momentum, each with equal betas or
    momenta in all groups. Returns None for other options and classes, with hooks of ``step``, and after steps, whose
    state continues: these optimizers keep their own ``step``.
    """
    config = with_rate_of(optimizer, config)
    groups = optimizer.param_groups
    hooks = [vars(optimizer).get(name) for name in STEP_HOOKS]
    if any(hooks) or any(group.get(name) for group in groups for name in OPTIONS) or any(optimizer.state.values()):
        return None
    step = inspect.unwrap(type(optimizer).step)  # a subclass may have its own
    if isinstance(optimizer, torch.optim.Adam) and step is inspect.unwrap(torch.optim.Adam.step):
        # AdamW is a subclass since torch 2.8.
        is_adamw = isinstance(optimizer, torch.optim.AdamW)
        decoupled = is_adamw or all(group.get("decoupled_weight_decay") for group in groups)
        betas = {tuple(map(float, group["betas"])) for group in groups}
        if len(betas) > 1 or (not decoupled and any(group["weight_decay"] for group in groups)):
            return None
        ((beta1, beta2),) = betas
        return replace(config, optimizer="adam", adam_beta1=beta1, adam_beta2=beta2)
    if isinstance(optimizer, torch.optim.SGD) and step is inspect.unwrap(torch.optim.SGD.step):
        momenta = {float(group["momentum"]) for group in groups}
        settings = config.section(MomentumConfig)
        return replace(settings, optimizer="sgd", sgd_momentum=momenta.pop()) if len(momenta) == 1 else None
    return None


def settings_of_class(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> OptimizerConfig:
    """Return settings that name the class of the caller's own optimizer; ``ConfigError`` if it needs a closure."""
    if needs_closure(optimizer):
        raise ConfigError(
            f"optimizer={type(optimizer).__name__} needs a closure, but an engine computes gradients once a step; use "
            "an optimizer whose step() has no arguments"
        )
    return replace(with_rate_of(optimizer, config), optimizer=register_class(optimizer))


def with_rate_of(optimizer: torch.optim.Optimizer, config: OptimizerConfig) -> OptimizerConfig:
    """Return ``config`` with the highest rate of ``optimizer``, to which ``min_lr`` belongs, unless ``lr`` is set."""
    rates = [float(group["lr"]) for group in optimizer.param_groups if group.get("lr")]
    return replace(config, lr=max(rates)) if rates and config.lr == OptimizerConfig().lr else config


def needs_whole_parameters(optimizer: torch.optim.Optimizer | None, parallel: ParallelConfig, ranks: int) -> bool:
    """Whether shards must consist of whole parameters for the caller's ``optimizer`` on ``ranks`` ranks.

    An optimizer that updates each element by itself (RMSprop, NAdam) runs at every ZeRO stage. One that updates each
    parameter as a whole (Adafactor) runs up to stage 1, and one that reads the whole model at stage 0 only. Errors:
    ``ConfigError`` for a higher stage.
    """
    stage = parallel.dp_zero_stage
    if optimizer is None or stage == 0 or ranks == 1:
        return False
    coupling = coupling_of(optimizer)
    if coupling == "none":
        return False
    if coupling == "parameter" and stage == 1:
        return True
    reads = "all elements of its parameter" if coupling == "parameter" else "more than its parameter, or random numbers"
    raise ConfigError(
        f"optimizer={type(optimizer).__name__} with zero_stage={stage}: the update of an element depends on {reads}, "
        f"and shards cut {'parameters' if coupling == 'parameter' else 'the model'}; set zero_stage="
        f"{'1 or 0' if coupling == 'parameter' else '0'}, or use an optimizer that updates each element by itself"
    )


def optimizer_on(
    data: DataParallel,
    config: RunConfig,
    groups: ParallelGroups,
    param_groups: Groups,
    own_optimizer: torch.optim.Optimizer | None,
) -> Optimizer:
    """Return the optimizer on this rank's shards: the configured one, or the caller's own."""
    scale = make_loss_scale(config.optimizer, getattr(torch, config.training.compute_dtype))
    settings = data, config.optimizer, groups, scale, config.model.kernel_backend, config.training.seed
    if own_optimizer is None:
        return Optimizer(*settings, param_groups=param_groups)
    return TorchOptimizer(own_optimizer, *settings, param_groups=param_groups)
