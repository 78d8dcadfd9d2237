"""Settings of the loss of preferences."""

from dataclasses import dataclass

from megatron_core.config import ranges as r
from megatron_core.config.setting import Resume, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section(needs=given("dpo"), resume=Resume.REPORTED)
class PreferenceConfig:
    """The loss of preferences."""

    dpo_beta: float = setting(0.1, r.POSITIVE)
    """Factor of the log-probability ratios in the loss of --dpo."""
    dpo_label_smoothing: float = setting(0.0, r.from_0(0.5))
    """Assumed share of pairs whose answers are swapped, below 0.5."""
