"""The settings of optimizer state in bfloat16."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config.conditions import BF16, TRAINING
from megatron_core.config.setting import Condition, Resume, given, section, setting
from megatron_core.config.training import OptimizerConfig

PRECISION_AWARE = given("use_precision_aware_optimizer")
BF16_STATE = Condition(
    "--main-params-dtype, --exp-avg-dtype or --exp-avg-sq-dtype bf16", lambda run: run.optimizer.bf16_settings
)


def has_moment(name: str, words: str) -> Condition:
    """The condition that the setting ``name`` determines the precision of a moment of the run's optimizer."""
    return Condition(
        words,
        lambda run: any(
            moment.dtype_setting == name for row in run.optimizer.kinds for moment in row.moments(run.optimizer)
        ),
    )


@dataclass(frozen=True, kw_only=True)
@section(when=TRAINING, resume=Resume.REPORTED)
class BF16StateConfig(OptimizerConfig):
    """Main weights and moments in bfloat16."""

    use_precision_aware_optimizer: bool = setting(False, when=BF16_STATE)
    """Allow bf16 for --main-params-dtype, --exp-avg-dtype and --exp-avg-sq-dtype; updates are computed in float32 and
    rounded stochastically."""
    main_params_dtype: Literal["fp32", "bf16"] = setting("fp32", needs=(PRECISION_AWARE, BF16))
    """Main weights. bf16: none; the optimizer updates the --bf16 weights directly."""
    exp_avg_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", needs=(PRECISION_AWARE, BF16), when=has_moment("exp_avg_dtype", "a first moment")
    )
    """Precision of the first moment, or of the momentum of optimizers with one moment."""
    exp_avg_sq_dtype: Literal["fp32", "bf16"] = setting(
        "fp32", needs=(PRECISION_AWARE, BF16), when=has_moment("exp_avg_sq_dtype", "a second moment")
    )
    """Precision of the second moment."""

    @property
    def bf16_settings(self) -> dict[str, str]:
        """See ``AlgorithmConfig``."""
        names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
        return {name: getattr(self, name) for name in names if getattr(self, name) == "bf16"}

    @property
    def rounded_update(self) -> str:
        """See ``OptimizerConfig``."""
        return "megatron_core.features.bf16_state.rounding:update_rounded"
