"""Loss scales of float16: constant, or dynamic near the largest one without overflow.

Small gradients underflow in float16, so the loss is multiplied by the scale before backward and the gradients are
divided by it afterwards (Micikevicius et al. 2018, section 3.2).
"""

from dataclasses import dataclass

from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.features.loss_scaling.settings import LossScaleConfig
from megatron_core.optimizer.loss_scale import LossScale


def loss_scale_of(config: LossScaleConfig) -> LossScale:
    """Return the constant ``loss_scale`` if set, else a dynamic scale."""
    if config.loss_scale is not None:
        return LossScale(config.loss_scale)
    return DynamicLossScale(
        initial=config.initial_loss_scale,
        minimum=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


@dataclass(eq=False)
class DynamicLossScale(LossScale):
    """A scale that grows after good steps and shrinks after overflows, like Megatron-LM's DynamicGradScaler.

    After ``window`` consecutive good steps, the scale is multiplied by ``growth_factor``. The overflow number
    ``hysteresis`` and every later overflow multiply the scale by ``backoff_factor``, down to ``minimum``; the number of
    overflows is reset only when the scale grows.

    ``found_inf`` must be the same on every rank; otherwise the ranks' scales would differ.
    """

    initial: float
    minimum: float
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    window: int = 1000
    hysteresis: int = 2

    def __post_init__(self) -> None:
        """Check the settings and start at ``initial``."""
        minimum = self.minimum
        growth = self.growth_factor
        backoff = self.backoff_factor
        _require(minimum > 0, f"min_loss_scale={minimum} is out of range; legal: a number above 0")
        start = f"initial_loss_scale={self.initial} is less than min_loss_scale={minimum}; raise it"
        _require(self.initial >= minimum, start)
        _require(growth > 1, f"growth_factor={growth} is out of range; legal: a number above 1")
        _require(0 < backoff < 1, f"backoff_factor={backoff} is out of range; legal: between 0 and 1")
        _require(self.window >= 1, f"loss_scale_window={self.window} is out of range; legal: 1, 2, 3, ...")
        _require(self.hysteresis >= 1, f"hysteresis={self.hysteresis} is out of range; legal: 1, 2, 3, ...")
        super().__init__(self.initial)
        self.minimum = float(minimum)
        self._good_steps = 0
        self._chances = self.hysteresis
        self._delay = 0

    def delay_growth(self, steps: int) -> None:
        """Do not count the first ``steps`` good steps, now and after each overflow; DeepSpeed skips one."""
        self._delay = steps
        self._good_steps = -steps

    def update(self, found_inf: bool) -> None:
        """Update the scale after a step; ``found_inf``: whether a gradient on any rank was not finite."""
        if found_inf:
            self._good_steps = -self._delay
            # A single overflow may come from one unusual batch; the scale shrinks when several come.
            self._chances -= 1
            if self._chances <= 0:
                self.scale = max(self.scale * self.backoff_factor, self.minimum)
            return
        self._good_steps += 1
        if self._good_steps >= self.window:
            self._good_steps = 0
            self._chances = self.hysteresis
            self.scale *= self.growth_factor

    def state_dict(self) -> dict[str, float]:
        """Return the scale and both counters as plain numbers, under Megatron-LM's names."""
        return {"scale": self.scale, "growth_tracker": self._good_steps, "hysteresis_tracker": self._chances}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore ``state_dict()``; an empty state, from a run with a constant scale, has no effect."""
        if not state:
            return
        missing = {"scale", "growth_tracker", "hysteresis_tracker"} - state.keys()
        if missing or not state["scale"] > 0:
            raise CheckpointError(
                f"loss scale state {state} needs a scale above 0, a growth_tracker and a hysteresis_tracker; "
                "load with --no-load-optim to start with the initial scale"
            )
        self.scale = float(state["scale"])
        self._good_steps = int(state["growth_tracker"])
        self._chances = int(state["hysteresis_tracker"])


def _require(condition: bool, message: str) -> None:
    """Raise ``ConfigError(message)`` unless ``condition`` is true."""
    if not condition:
        raise ConfigError(message)
