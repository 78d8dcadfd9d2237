"""The settings and the rows of SGD and Lion."""

from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.optimizers import Moment, OptimizerKind, read_by
from megatron_core.config.setting import Resume, section, setting
from megatron_core.config.training import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
@section(when=c.TRAINING, resume=Resume.REPORTED)
class MomentumConfig(OptimizerConfig):
    """Momentum of SGD and Lion."""

    sgd_momentum: float = setting(0.9, r.BELOW_1, when=read_by("sgd_momentum", "sgd"))
    """Momentum for --optimizer sgd; 0: no momentum and no state."""
    lion_beta1: float = setting(0.95, r.BELOW_1, when=read_by("lion_beta1", "lion"))
    """Weight of the running mean in the direction of an update, for --optimizer lion."""
    lion_beta2: float = setting(0.98, r.BELOW_1, when=read_by("lion_beta2", "lion"))
    """Decay rate of the running mean of gradients, for --optimizer lion."""


SGD = OptimizerKind(
    name="sgd",
    rule="megatron_core.features.sgd_and_lion.updates:SGD",
    all_moments=(Moment("momentum_buffer", absent_at_zero="sgd_momentum"),),
    settings=("sgd_momentum",),
    hidden_lr_power=0,
    other_lr_power=1,
)
LION = OptimizerKind(
    name="lion",
    rule="megatron_core.features.sgd_and_lion.updates:Lion",
    all_moments=(Moment("exp_avg"),),
    settings=("lion_beta1", "lion_beta2"),
)
