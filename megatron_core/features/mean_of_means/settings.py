"""The setting of the mean of the loss, and its rules."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Resume, section, setting


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.REPORTED)
class MeanOfMeansConfig:
    """The mean that is the loss of a step."""

    calculate_per_token_loss: bool = setting(True, when=ALWAYS)
    """The loss is the mean over the tokens of the global batch. Off, as in Megatron-LM by default: the mean over
    micro-batches (with context parallelism also over their parts on ranks) of means over their tokens; it depends on
    the layout and differs only if some tokens are masked. Then logs show
    Megatron-LM's numbers: means over tokens, and for evaluations with --sft means of means."""


def uses_mean_of_means(config: RunConfig) -> bool:
    """Whether the loss of a run is a mean of means."""
    return not config.section(MeanOfMeansConfig).calculate_per_token_loss


def other_loss_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Features whose loss replaces this one."""
    for name in ("dpo", "kd_teacher") if uses_mean_of_means(config) else ():
        if not config.optional(name):
            continue
        yield (
            f"calculate_per_token_loss=False cannot be used with {name}, which has a loss of its own; "
            "remove --no-calculate-per-token-loss"
        )
