"""The settings, the rules and the row of LAMB."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.optimizers import Moment, OptimizerKind, read_by
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Resume, section, setting
from megatron_core.config.training import OptimizerConfig


@dataclass(frozen=True, kw_only=True)
@section(when=c.TRAINING, resume=Resume.REPORTED)
class LAMBConfig(OptimizerConfig):
    """Limits and bias correction of LAMB."""

    lamb_max_coeff: float = setting(10.0, r.POSITIVE, when=read_by("lamb_max_coeff", "lamb"))
    """Upper limit of |weights| / |update|, the factor of a tensor's update, for --optimizer lamb."""
    lamb_min_coeff: float = setting(0.01, r.POSITIVE, when=read_by("lamb_min_coeff", "lamb"))
    """Lower limit of |weights| / |update|, for --optimizer lamb."""
    lamb_bias_correction: Literal["moments", "rate", "none"] = setting(
        "moments", when=(read_by("lamb_bias_correction", "lamb"), c.CORRECTS_BIAS)
    )
    """Bias correction of LAMB. moments: divide the moments by 1 - beta^step (You et al. 2019). rate: multiply the
    learning rate by sqrt(1 - beta2^step) / (1 - beta1^step), as DeepSpeed. none: use the moments as they are."""


ROW = OptimizerKind(
    name="lamb",
    rule="megatron_core.features.lamb.update:LAMB",
    all_moments=(Moment("exp_avg", None), Moment("exp_avg_sq", None)),
    settings=("adam_beta1", "adam_beta2", "adam_eps", "lamb_max_coeff", "lamb_min_coeff", "lamb_bias_correction"),
    hidden_lr_power=0,  # the size of updates is in proportion to the weights
)


def uses_lamb(config: RunConfig) -> bool:
    """Whether the run has this optimizer."""
    return config.optimizer.optimizer == "lamb"


def lamb_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Limits in the wrong order, and state that LAMB cannot have."""
    if not uses_lamb(config):
        return
    settings = config.section(LAMBConfig)
    if settings.lamb_min_coeff > settings.lamb_max_coeff:
        yield (
            f"lamb_min_coeff={settings.lamb_min_coeff} is above lamb_max_coeff={settings.lamb_max_coeff}; use a "
            "smaller --lamb-min-coeff"
        )
    if settings.offloads_optimizer or settings.bf16_settings:
        yield (
            "optimizer=lamb needs norms of whole tensors before it updates a weight, so its main weights must be in "
            "float32 on the device; remove --optimizer-cpu-offload, --optimizer-offload-dir and "
            "--main-params-dtype bf16"
        )
