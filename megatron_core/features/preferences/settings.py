"""Settings of preferences."""

from dataclasses import dataclass

from megatron_core.config import ranges as r
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section(needs=given("dpo"), resume=Resume.REPORTED)
class PreferenceConfig:
    """Pairs of a chosen and a rejected answer, and their loss."""

    dpo: bool = setting(False, when=ALWAYS)
    """Fine-tune on preferences (DPO): data files are JSON Lines with prompt, chosen and rejected. The reference is the
    model without its adapters, or without --lora-rank a frozen copy of its initial weights. Samples are single answers:
    chosen and rejected in turn."""
    dpo_beta: float = setting(0.1, r.POSITIVE)
    """Factor of the log-probability ratios in the loss of --dpo."""
    dpo_label_smoothing: float = setting(0.0, r.from_0(0.5))
    """Assumed share of pairs whose answers are swapped, below 0.5."""


def has_preferences(config: RunConfig) -> bool:
    """Whether a run trains on pairs of answers."""
    return config.section(PreferenceConfig).dpo
