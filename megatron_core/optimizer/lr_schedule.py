"""The learning rate as a pure function of the optimizer step."""

import math

from megatron_core.config.training import OptimizerConfig
from megatron_core.errors import ConfigError


class LearningRateSchedule:
    """Warm-up and decay, as in Megatron-LM's ``OptimizerParamScheduler``.

    n is the optimizer step, counted from 1; W is the number of warm-up steps; D is the step at the end of the decay
    (``lr_decay_iters``, or the last step). With ``by_samples`` all three are numbers of consumed sequences.

        n <= W:  lr = init + (max - init) n / W
        n > D:   lr = min                                (except "constant": lr = max)
        else:    lr = min + c(r) (max - min)             with r = (n - W) / (D - W)

    """

    # c is ``1 - r`` (linear) or ``(cos(pi r) + 1) / 2`` (cosine). "inverse-square-root" is
    # ``max(max_lr sqrt(W / n), min_lr)``. "WSD" has c = 1 before its decay phase; at the fraction x of that phase, c is
    # ``1 - x`` (linear), ``(cos(pi x) + 1) / 2`` (cosine), ``2 0.5^x - 1`` (exponential) or ``1 - sqrt(x)``
    # (minus_sqrt).
    # Megatron-LM logs the same value for iteration n, but applies it one step later: there step n uses the value for
    # n - 1, and the first step has lr = 0. Here the first step of warm-up has lr > 0, and step W the highest.
    # The schedule has no state: a run resumed with other settings uses the new settings from its first step.

    def __init__(self, config: OptimizerConfig, total_steps: int, *, by_samples: bool = False) -> None:
        """``total_steps``: number of optimizer steps of the training, or of sequences with ``by_samples``."""
        self.config = config
        self.by_samples = by_samples
        self.total_steps = max(total_steps, 1)
        decay = config.lr_decay_samples if by_samples else config.lr_decay_iters
        self.decay_steps = total_steps if decay is None else decay
        warmup = config.lr_warmup_samples if by_samples else config.lr_warmup_iters
        # As in Megatron-LM, the fraction is not rounded to whole steps.
        self.warmup_steps: float = (
            warmup if config.lr_warmup_fraction is None else config.lr_warmup_fraction * self.decay_steps
        )
        self.wsd_steps = config.lr_wsd_decay_samples if by_samples else config.lr_wsd_decay_iters
        if config.lr_decay_style == "WSD" and self.wsd_steps is None:
            raise ConfigError(
                "lr_wsd_decay_iters=None is missing for lr_decay_style=WSD; give the steps of the last phase"
            )

    def lr(self, step: int) -> float:
        """Return the learning rate of optimizer step ``step``, counted from 1.

        With ``by_samples``, ``step`` is the number of sequences consumed after the step.
        """
        config = self.config
        if self.warmup_steps > 0 and step <= self.warmup_steps:
            return config.lr_warmup_init + (config.lr - config.lr_warmup_init) * step / self.warmup_steps
        if config.lr_decay_style == "constant":
            return config.lr
        if step > self.decay_steps:
            return config.min_lr
        if config.lr_decay_style == "inverse-square-root":
            return max(config.lr * math.sqrt((self.warmup_steps or 1) / max(step, 1)), config.min_lr)
        return config.min_lr + self._coefficient(step) * (config.lr - config.min_lr)

    def weight_decay(self, step: int) -> float:
        """Return the weight decay of a step, as in Megatron-LM.

        It changes from ``start_weight_decay`` at step 0 to ``end_weight_decay`` at the last step, linearly or along
        half a period of the cosine.
        """
        config = self.config
        if config.weight_decay_incr_style == "constant":
            return config.weight_decay
        start = config.start_weight_decay or 0.0
        end = config.end_weight_decay or 0.0
        share = min(step / self.total_steps, 1.0)
        return start + (1.0 - _shape(config.weight_decay_incr_style, share)) * (end - start)

    def _coefficient(self, step: int) -> float:
        """Return (lr - min) / (max - min): 1 at the end of warm-up and 0 at the end of the decay."""
        if self.config.lr_decay_style == "WSD":
            phase = self.wsd_steps or 1
            done = (step - (self.decay_steps - phase)) / phase
            return 1.0 if done <= 0 else _shape(self.config.lr_wsd_decay_style, done)
        return _shape(self.config.lr_decay_style, (step - self.warmup_steps) / (self.decay_steps - self.warmup_steps))


def _shape(style: str, done: float) -> float:
    """Return the value of the decay curve, 1 at ``done`` = 0 and 0 at ``done`` = 1."""
    if style == "linear":
        return 1.0 - done
    if style == "cosine":
        return 0.5 * (math.cos(math.pi * done) + 1.0)
    if style == "exponential":
        return 2.0 * 0.5**done - 1.0
    return 1.0 - math.sqrt(done)
