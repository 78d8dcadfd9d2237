"""Schedules of learning rate and weight decay of an optimizer's parameter groups."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.optimizer.optimizer_config import ParamGroupOverride, combine_param_group_overrides
from megatron_core.config import OptimizerConfig
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.optimizer.lr_schedule import LearningRateSchedule


def get_canonical_lr_for_logging(param_groups: Sequence[dict[str, Any]]) -> float | None:
    """Return the learning rate of the first group marked ``default_config``; None without such a group."""
    return next((group.get("lr") for group in param_groups if group.get("default_config")), None)


def param_group_override_to_tuple(param_group_override: ParamGroupOverride | None) -> tuple | None:
    """Return the settings sorted by name, as a key; None for None."""
    return None if param_group_override is None else tuple(sorted(param_group_override.items()))


_SAVED = (
    "max_lr",
    "lr_warmup_steps",
    "num_steps",
    "lr_decay_style",
    "lr_decay_steps",
    "min_lr",
    "start_wd",
    "end_wd",
    "wd_incr_style",
    "wd_incr_steps",
)
_OLD_NAMES = {
    "max_lr": ("start_lr",),
    "lr_warmup_steps": ("warmup_iter", "warmup_steps"),
    "lr_decay_steps": ("end_iter", "decay_steps"),
    "lr_decay_style": ("decay_style",),
    "num_steps": ("num_iters",),
}


@dataclass(eq=False)
class OptimizerParamScheduler:
    """Sets ``lr`` and ``weight_decay`` of ``optimizer.param_groups`` by the rules of ``LearningRateSchedule``.

    ``max_lr``, ``min_lr``, ``start_wd`` and ``end_wd`` of a group replace the scheduler's; ``wd_mult`` multiplies its
    weight decay. ``step(increment)`` counts any unit, such as steps or sequences. Raises ConfigError for contradictory
    settings.
    """

    optimizer: Any
    init_lr: float
    max_lr: float
    min_lr: float
    lr_warmup_steps: int
    lr_decay_steps: int
    lr_decay_style: str
    start_wd: float
    end_wd: float
    wd_incr_steps: int
    wd_incr_style: str
    use_checkpoint_opt_param_scheduler: bool | None = True
    override_opt_param_scheduler: bool | None = False
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str | None = None

    def __post_init__(self) -> None:
        self.max_lr = float(self.max_lr)
        self.num_steps = 0
        self._check()
        self.step(0)

    def _check(self) -> None:
        rules = {
            "0 <= min_lr <= max_lr": 0.0 <= self.min_lr <= self.max_lr,
            "init_lr <= max_lr": self.init_lr <= self.max_lr,
            "0 <= lr_warmup_steps < lr_decay_steps": 0 <= self.lr_warmup_steps < self.lr_decay_steps,
            "0 <= start_wd <= end_wd": 0.0 <= self.start_wd <= self.end_wd,
            "wsd_decay_steps with lr_decay_style=WSD": self.lr_decay_style != "WSD" or self.wsd_decay_steps is not None,
            "start_wd = end_wd with wd_incr_style=constant": self.wd_incr_style != "constant"
            or self.start_wd == self.end_wd,
            "override or use-checkpoint, not both": not (
                self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler
            ),
        }
        broken = [rule for rule, kept in rules.items() if not kept]
        if broken:
            raise ConfigError(f"OptimizerParamScheduler needs {'; '.join(broken)}")

    def get_wd(self, param_group: dict[str, Any] | None = None) -> float:
        """Return the weight decay of a group, without ``wd_mult``."""
        group = param_group or {}
        start, end = group.get("start_wd", self.start_wd), group.get("end_wd", self.end_wd)
        if self.num_steps > self.wd_incr_steps or self.wd_incr_style == "constant":
            return end
        done = self.num_steps / self.wd_incr_steps
        if self.wd_incr_style == "linear":
            return start + done * (end - start)
        if self.wd_incr_style == "cosine":
            return start + 0.5 * (math.cos(math.pi * (1 - done)) + 1.0) * (end - start)
        raise ConfigError(f"wd_incr_style={self.wd_incr_style!r} is none of constant, linear, cosine")

    def get_lr(self, param_group: dict[str, Any]) -> float:
        """Return the learning rate of a group."""
        if self.num_steps == 0 and self.lr_warmup_steps > 0:
            return self.init_lr
        return self._schedule(param_group).lr(self.num_steps)

    def _schedule(self, group: dict[str, Any]) -> LearningRateSchedule:
        styles = ("constant", "linear", "cosine", "WSD", "inverse-square-root")
        if self.lr_decay_style not in styles:
            raise ConfigError(f"lr_decay_style={self.lr_decay_style!r} is none of {', '.join(styles)}")
        config = OptimizerConfig(
            lr=self.max_lr if group.get("max_lr") is None else group["max_lr"],
            min_lr=group.get("min_lr", self.min_lr),
            lr_decay_style=self.lr_decay_style,  # type: ignore[arg-type]
            lr_decay_iters=self.lr_decay_steps,
            lr_warmup_iters=self.lr_warmup_steps,
            lr_warmup_init=self.init_lr,
            lr_wsd_decay_style=self.lr_wsd_decay_style or "exponential",  # type: ignore[arg-type]
            lr_wsd_decay_iters=self.wsd_decay_steps,
        )
        return LearningRateSchedule(config, self.lr_decay_steps)

    def step(self, increment: int) -> None:
        """Advance by ``increment`` and set learning rate and weight decay of every group."""
        self.num_steps += increment
        for group in self.optimizer.param_groups:
            lr = self.get_lr(group)
            if isinstance(group.get("lr"), torch.Tensor):
                group["lr"].fill_(lr)
            else:
                group["lr"] = lr
            group["weight_decay"] = self.get_wd(group) * group.get("wd_mult", 1.0)

    def state_dict(self) -> dict[str, Any]:
        """Return the state under Megatron's names."""
        return {name: getattr(self, name) for name in _SAVED}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a ``state_dict``, also of an old release; the count is always restored.

        Other values are restored, unless ``override_opt_param_scheduler`` is set. Raises CheckpointError if values
        differ and neither ``override_opt_param_scheduler`` nor ``use_checkpoint_opt_param_scheduler`` is set.
        """
        found = {}
        for name in _SAVED:
            known = [state_dict[key] for key in (*_OLD_NAMES.get(name, ()), name) if key in state_dict]
            if known:
                found[name] = known[0]
        steps = found.pop("num_steps")
        for name, saved in found.items() if not self.override_opt_param_scheduler else ():
            own = getattr(self, name)
            if own != saved and not self.use_checkpoint_opt_param_scheduler:
                raise CheckpointError(
                    f"{name}={own}, but the checkpoint has {saved}; set override_opt_param_scheduler or "
                    "use_checkpoint_opt_param_scheduler"
                )
            setattr(self, name, saved)
        self.num_steps = 0  # a program may load after it has trained
        self.step(steps)
