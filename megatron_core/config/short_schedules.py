"""Schedules of batch size, sequence length and learning rate that change within the few steps of a comparison."""

from collections.abc import Iterator
from typing import Any

from megatron_core.config.run import RunConfig

STEPS = 10
"""Steps of the whole training, of which a comparison takes the first ones."""
LEARNING_RATE = 1e-3
_WARMUP, _DECAY, _LAST_PHASE = 2, 8, 4
"""Steps of the parts of the learning rate's schedule."""


def short_schedules(config: RunConfig, batch: int, length: int) -> Iterator[dict[str, Any]]:
    """Yield settings for each schedule of ``config``, which can be left out on their own.

    A ramp begins with ``batch`` samples, or ``length`` tokens, which are legal in all layouts, and ends with twice as
    many after the first step.
    """
    training = config.training
    # GroupsInOneProcess, with which outer groups are compared, has a constant batch.
    if config.outer.num_groups == 1 and training.step_batch_size_schedule is not None:
        steps = (f"0:{batch}", f"{batch * length}:{2 * batch}")
        yield {"global_batch_size": None, "step_batch_size_schedule": steps}
    elif config.outer.num_groups == 1 and training.rampup_batch_size is not None:
        yield {"global_batch_size": 2 * batch, "rampup_batch_size": (batch, batch, batch)}
    if config.data.seq_length_warmup is not None:
        yield {"seq_length": 2 * length, "seq_length_warmup": (length, length, batch)}
    yield short_rates(config, LEARNING_RATE)


def short_rates(config: RunConfig, lr: float) -> dict[str, Any]:
    """Settings with which the learning rate has the course of ``config`` from ``lr`` on within ``STEPS`` steps."""
    optimizer = config.optimizer
    scale = lr / optimizer.lr if optimizer.lr else 0.0
    settings: dict[str, Any] = {
        "lr_decay_style": optimizer.lr_decay_style,
        "min_lr": optimizer.min_lr * scale,
        "lr_warmup_init": optimizer.lr_warmup_init * scale,
    }
    if optimizer.lr_warmup_fraction is not None:
        settings["lr_warmup_fraction"] = max(optimizer.lr_warmup_fraction, _WARMUP / STEPS)
    elif optimizer.lr_warmup_iters or optimizer.lr_warmup_samples:
        settings["lr_warmup_iters"] = _WARMUP
    if optimizer.lr_decay_iters is not None or optimizer.lr_decay_samples is not None:
        settings["lr_decay_iters"] = _DECAY
    if optimizer.lr_wsd_decay_iters is not None or optimizer.lr_wsd_decay_samples is not None:
        settings["lr_wsd_decay_iters"] = _LAST_PHASE
    return settings
