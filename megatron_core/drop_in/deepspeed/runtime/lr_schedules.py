"""DeepSpeed's learning-rate schedules, for any optimizer with ``param_groups``.

All count optimizer steps i = 0, 1, ...; the construction sets the learning rate of the first step, and ``step()`` after
it sets the rate for i = 0.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

from torch import is_tensor
from torch.optim import Optimizer

from deepspeed.runtime.lr_arguments import *  # noqa: F403
from deepspeed.runtime.lr_arguments import WARMUP_LINEAR_RATE, WARMUP_LOG_RATE

_BETA2 = 0.99
"""Second beta of OneCycle with a cycle of momentum, a constant in DeepSpeed."""

Value = float | Sequence[float]


def get_torch_optimizer(optimizer: Any) -> Optimizer:
    """Return ``optimizer``, or the torch optimizer that it wraps."""
    for each in (optimizer, getattr(optimizer, "optimizer", None)):
        if isinstance(each, Optimizer):
            return each
    raise TypeError(f"{type(optimizer).__name__} is not a subclass of torch.optim.Optimizer; give a torch optimizer")


def update_lr(param_groups: list[dict[str, Any]], lrs: Sequence[Any]) -> list[Any]:
    """Set the learning rates of the groups; tensors are filled in place."""
    for group, lr in zip(param_groups, lrs, strict=False):
        if is_tensor(group["lr"]):
            group["lr"].fill_(lr.squeeze() if is_tensor(lr) else lr)
        else:
            group["lr"] = lr
    return [group["lr"] for group in param_groups]


class _Schedule:
    """Position and state of a schedule; subclasses implement ``get_lr``."""

    def __init__(self, optimizer: Any, last_batch_iteration: int) -> None:
        self.optimizer = get_torch_optimizer(optimizer)
        self.last_batch_iteration = last_batch_iteration
        self._last_lr: list[Any] | None = None

    def get_lr(self) -> list[Any]:
        """Learning rate of each group at the current step."""
        raise NotImplementedError

    def get_last_lr(self) -> list[Any]:
        """Learning rate of each group that was set last."""
        assert self._last_lr is not None, "need to call step() first"
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go to the next step, or to ``last_batch_iteration``, and set the learning rates."""
        self.last_batch_iteration = (
            self.last_batch_iteration + 1 if last_batch_iteration is None else last_batch_iteration
        )
        self._set(self.get_lr())

    def state_dict(self) -> dict[str, int]:
        """The position."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, sd: dict[str, int]) -> None:
        """Restore the position; the next ``step`` sets the rates."""
        self.last_batch_iteration = sd["last_batch_iteration"]

    def _set(self, rates: Sequence[Any]) -> None:
        self._last_lr = update_lr(self.optimizer.param_groups, rates)

    def _per_group(self, value: Value, name: str) -> list[float]:
        groups = len(self.optimizer.param_groups)
        for entry in value if isinstance(value, list | tuple) else [value]:
            _number(name, entry)
        if not isinstance(value, list | tuple):
            return [value] * groups  # type: ignore[list-item]
        if len(value) != groups:
            raise ValueError(f"expected {groups} values for {name}, got {len(value)}")
        return list(value)


class LRRangeTest(_Schedule):
    """lr(i) = min_lr (1 + step_rate (i + 1) / step_size), in stairs on request (Smith 2018, section 4.1)."""

    def __init__(
        self,
        optimizer: Any,
        lr_range_test_min_lr: Value = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.min_lr = self._per_group(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size = _positive("lr_range_test_step_size", lr_range_test_step_size)
        self.step_rate = _number("lr_range_test_step_rate", lr_range_test_step_rate)
        self.staircase = _flag("lr_range_test_staircase", lr_range_test_staircase)
        if last_batch_iteration == -1:
            self._set(self.min_lr)

    def get_lr(self) -> list[Any]:
        """Learning rate of each group at the current step."""
        interval = (self.last_batch_iteration + 1) / self.step_size
        increase = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [each * increase for each in self.min_lr]


class OneCycle(_Schedule):
    """From ``cycle_min_lr`` to ``cycle_max_lr`` and back, then a decay; momentum in reverse (Smith 2018, section 4)."""

    def __init__(
        self,
        optimizer: Any,
        cycle_min_lr: Value,
        cycle_max_lr: Value,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Value = 0.8,
        cycle_max_mom: Value = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        # The shape of the cycle.
        if cycle_second_step_size is None:
            cycle_second_step_size = cycle_first_step_size
        self.first_step_size = float(_number("cycle_first_step_size", cycle_first_step_size))
        self.second_step_size = float(_number("cycle_second_step_size", cycle_second_step_size))
        if self.first_step_size <= 0:
            raise ValueError(f"cycle_first_step_size must be positive, got {cycle_first_step_size}")
        if self.second_step_size < 0:
            raise ValueError(f"cycle_second_step_size must be non-negative, got {cycle_second_step_size}")
        self.total_size = self.first_step_size + self.second_step_size
        if cycle_second_stair_count is None:
            cycle_second_stair_count = cycle_first_stair_count
        self.first_stair_count = _number("cycle_first_stair_count", cycle_first_stair_count)
        self.second_stair_count = _number("cycle_second_stair_count", cycle_second_stair_count)
        self.decay_step_size = _number("decay_step_size", decay_step_size)
        self.decay_lr_rate = _number("decay_lr_rate", decay_lr_rate)
        self.decay_mom_rate = _number("decay_mom_rate", decay_mom_rate)
        # Bounds of the learning rate and of the momentum.
        self.min_lrs = self._per_group(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._per_group(cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = _flag("cycle_momentum", cycle_momentum)
        if cycle_momentum and "betas" not in self.optimizer.defaults:
            warnings.warn(
                f"OneCycle: cycle_momentum has no effect on {type(self.optimizer).__name__}, which has no betas",
                stacklevel=2,
            )
            self.cycle_momentum = False
        self.min_moms = self._per_group(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._per_group(cycle_max_mom, "cycle_max_mom")
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._set_momentum([(each, _BETA2) for each in self.min_moms])

    def get_lr(self) -> list[Any]:
        """Learning rate of each group at the current step."""
        if self.last_batch_iteration < self.total_size:
            share = self._height()
            return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]
        return [low / self._decay(self.decay_lr_rate) for low in self.min_lrs]

    def get_mom(self) -> list[tuple[float, float]] | None:
        """Betas of each group at the current step; None without a cycle of momentum."""
        if not self.cycle_momentum:
            return None
        if self.last_batch_iteration < self.total_size:
            share = self._height()
            pairs = zip(self.min_moms, self.max_moms, strict=True)
            return [(high - (high - low) * share, _BETA2) for low, high in pairs]
        return [(high * self._decay(self.decay_mom_rate), _BETA2) for high in self.max_moms]

    def step(self, batch_iteration: int | None = None) -> None:
        """Go to the next step, or to ``batch_iteration``, and set learning rates and momenta."""
        super().step(batch_iteration)
        momenta = self.get_mom()
        if momenta is not None:
            self._set_momentum(momenta)

    def _set_momentum(self, momenta: list[tuple[float, float]]) -> None:
        if self.cycle_momentum:
            for group, betas in zip(self.optimizer.param_groups, momenta, strict=True):
                group["betas"] = betas

    def _height(self) -> float:
        """Position between the bounds: 0 at the ends of the cycle, 1 at its middle; in stairs on request."""
        position = (self.last_batch_iteration + 1) % self.total_size
        if position <= self.first_step_size:
            done, size, stairs = position, self.first_step_size, self.first_stair_count
        else:
            done, size, stairs = self.total_size - position, self.second_step_size, self.second_stair_count
        return math.floor(done * stairs / size) / stairs if stairs > 0 else done / size

    def _decay(self, rate: float) -> float:
        """1 + rate x (steps after the cycle) / decay_step_size."""
        if math.isclose(self.decay_step_size, 0) or math.isclose(rate, 0):
            return 1.0
        return 1 + rate * (self.last_batch_iteration - self.total_size + 1) / self.decay_step_size


class WarmupLR(_Schedule):
    """Warm-up from ``warmup_min_lr`` to ``warmup_max_lr``, logarithmic or linear, then constant."""

    def __init__(
        self,
        optimizer: Any,
        warmup_min_lr: Value = 0.0,
        warmup_max_lr: Value | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        if warmup_max_lr is None:
            warmup_max_lr = _own_rates(self.optimizer)
        self.min_lrs = self._per_group(warmup_min_lr, "min_lr")
        self.max_lrs = self._per_group(warmup_max_lr, "max_lr")
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[Any]:
        """Learning rate of each group at the current step."""
        if self.last_batch_iteration < 0:
            return self.min_lrs
        share = self._get_gamma()
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _get_gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return _warmup(self.last_batch_iteration, self.warmup_num_steps, self.warmup_type)
        return 1.0


class WarmupDecayLR(WarmupLR):
    """``WarmupLR``, then a linear decay to ``warmup_min_lr`` at step ``total_num_steps``."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_lr: Value = 0.0,
        warmup_max_lr: Value | None = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = _number("total_num_steps", total_num_steps)
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)
        _warn_of_short_training(total_num_steps, self.warmup_num_steps)

    def _get_gamma(self) -> float:
        if self.last_batch_iteration < self.warmup_num_steps:
            return super()._get_gamma()
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Schedule):
    """Warm-up from ``warmup_min_ratio`` to 1, then a cosine to ``cos_min_ratio``, times the groups' own rates."""

    def __init__(
        self,
        optimizer: Any,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = WARMUP_LOG_RATE,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self.warmup_num_steps = _warmup_steps(warmup_num_steps)
        self.warmup_type = _warmup_type(warmup_type)
        self.total_num_steps = _number("total_num_steps", total_num_steps)
        self.warmup_min_ratio = _number("warmup_min_ratio", warmup_min_ratio)
        self.cos_min_ratio = _number("cos_min_ratio", cos_min_ratio)
        _warn_of_short_training(total_num_steps, self.warmup_num_steps)
        self.org_lrs = _own_rates(self.optimizer)
        if last_batch_iteration == -1:
            self._set(self.get_lr())

    def get_lr(self) -> list[Any]:
        """Learning rate of each group at the current step."""
        ratio = self.get_lr_ratio()
        return [each * ratio for each in self.org_lrs]

    def get_lr_ratio(self) -> float:
        """Factor of the groups' own rates at the current step; 0 before the first ``step()``."""
        at, warmup = self.last_batch_iteration, self.warmup_num_steps
        if at < 0:
            return 0.0
        if at < warmup:
            return self.warmup_min_ratio + (1 - self.warmup_min_ratio) * _warmup(at, warmup, self.warmup_type)
        progress = min(1.0, (at - warmup + 1) / max(1, self.total_num_steps - warmup))
        return max(0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2)


def _own_rates(optimizer: Optimizer) -> list[Any]:
    """Return the rates of the groups; tensors are copied, because ``step`` fills them in place."""
    rates = [group["lr"] for group in optimizer.param_groups]
    return [each.clone() if is_tensor(each) else each for each in rates]


def _warmup(at: int, steps: int, kind: str) -> float:
    return at / steps if kind == WARMUP_LINEAR_RATE else math.log(at + 1) / math.log(steps)


def _number(name: str, value: Any) -> Any:
    """Return a number, or a tensor with one."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number and not (is_tensor(value) and value.numel() == 1):
        raise ValueError(f"{name}={value!r} must be a number")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be true or false")
    return value


def _positive(name: str, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        raise ValueError(f"{name} must be a positive integer, got {value}")
    return value


def _warmup_steps(steps: Any) -> int:
    """At least 2; 0 is the default of transformers' Trainer, which DeepSpeed accepted before 0.19."""
    return 2 if steps == 0 and not isinstance(steps, bool) else max(2, _positive("warmup_num_steps", steps))


def _warmup_type(kind: str) -> str:
    if kind in (WARMUP_LOG_RATE, WARMUP_LINEAR_RATE):
        return kind
    warnings.warn(f"warmup_type={kind!r} is unknown; log is used; choose log or linear", stacklevel=3)
    return WARMUP_LOG_RATE


def _warn_of_short_training(total: int, warmup: int) -> None:
    if total < warmup:
        warnings.warn(f"total_num_steps={total} is less than warmup_num_steps={warmup}", stacklevel=3)
