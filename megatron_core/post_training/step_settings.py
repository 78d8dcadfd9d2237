"""Settings of the optimizer for a single step, in place of the configured ones."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypedDict

from megatron_core.config.rules_single import illegal_values
from megatron_core.errors import ConfigError
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.training.driver import StepRates
from megatron_core.training.plans import StepSize
from megatron_core.training.setup import Run
from megatron_core.training.step import step_rates


class StepSettings(TypedDict, total=False):
    """Keyword arguments of a step; one that is missing or None is as configured."""

    lr: float | None
    """Learning rate, instead of the one of the schedule."""
    weight_decay: float | None
    betas: tuple[float, float] | None
    """Of Adam."""
    eps: float | None
    """Of Adam."""
    clip_grad: float | None
    """Largest norm of the gradients; 0: any."""


@contextmanager
def used_in_step(run: Run, size: StepSize, settings: StepSettings) -> Iterator[StepRates]:
    """Set ``settings`` inside the context, which takes a step of ``size``, and yield the rates of the step.

    Errors: ``ConfigError`` for values that are not legal, and for those of Adam with another optimizer.
    """
    changed = _changed(settings)
    optimizer = run.optimizer
    if not changed.keys() <= {"lr", "weight_decay", "clip_grad"} and optimizer.config.optimizer != "adam":
        raise ConfigError(
            f"betas={settings.get('betas')} and eps={settings.get('eps')} of a step are those of Adam, and the run has "
            f"optimizer={optimizer.config.optimizer}; leave them out"
        )
    # torch's AdamW, and so Tinker's, accepts an epsilon of 0.
    checked = {name: value for name, value in changed.items() if (name, value) != ("adam_eps", 0.0)}
    for problem in illegal_values(run.config.flat() | checked):
        raise ConfigError(problem)
    rates = step_rates(run, size)
    if "lr" in changed:
        rates = StepRates(changed["lr"], None, run.config.optimizer.weight_decay)
    if "weight_decay" in changed:
        rates = replace(rates, weight_decay=changed["weight_decay"])
    with _configured(optimizer, changed):
        yield rates


def _changed(settings: StepSettings) -> dict[str, Any]:
    """The settings of a run that differ in the step, by name."""
    beta1, beta2 = settings.get("betas") or (None, None)
    named = {
        "lr": settings.get("lr"),
        "weight_decay": settings.get("weight_decay"),
        "adam_beta1": beta1,
        "adam_beta2": beta2,
        "adam_eps": settings.get("eps"),
        "clip_grad": settings.get("clip_grad"),
    }
    return {name: value for name, value in named.items() if value is not None}


@contextmanager
def _configured(optimizer: Optimizer, changed: dict[str, Any]) -> Iterator[None]:
    """Configure the optimizer and its update rules with ``changed`` inside the context."""
    rules = {id(shard.algorithm): shard.algorithm for shard in optimizer.shards}
    readers: list[Any] = [optimizer, *rules.values()]
    configured = [reader.config for reader in readers]
    for reader in readers:
        reader.config = replace(reader.config, **changed)
    # Parameter groups, if there are any, hold the rates instead of the configuration.
    for group in optimizer.param_groups:
        config = optimizer.config
        group.update(lr=config.lr, weight_decay=config.weight_decay, eps=config.adam_eps)
        group["betas"] = config.adam_beta1, config.adam_beta2
    try:
        yield
    finally:
        for reader, config in zip(readers, configured, strict=True):
            reader.config = config
