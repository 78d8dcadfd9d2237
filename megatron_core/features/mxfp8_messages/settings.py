"""Settings of messages in 8 bits between tokens and experts."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Condition, Resume, section, setting
from megatron_core.config.training import TrainingConfig

ALL_TO_ALL = Condition(
    "--moe-token-dispatcher-type alltoall", lambda run: run.value("moe_token_dispatcher_type") == "alltoall"
)


@dataclass(frozen=True, kw_only=True)
@section(needs=c.EXPERTS, resume=Resume.REPORTED)
class MXFP8MessagesConfig(TrainingConfig):
    """Formats of messages between tokens and experts."""

    moe_dispatch_fwd_dtype: Literal["bf16", "mxfp8"] = setting("bf16", needs=ALL_TO_ALL)
    """Format in which tokens are sent to their experts. mxfp8: e4m3, with one power of two as the scale of 32 channels:
    33 bytes instead of 64. Tokens are rounded in every layout, also on one rank. bf16: the precision of activations."""
    moe_combine_bwd_dtype: Literal["bf16", "mxfp8"] = setting("bf16", needs=ALL_TO_ALL)
    """Format in which the gradients of the outputs of experts are sent to the experts, in backward; as
    --moe-dispatch-fwd-dtype."""


def sends_mxfp8(config: RunConfig) -> bool:
    """Whether messages are in 8 bits."""
    formats = config.section(MXFP8MessagesConfig)
    return "mxfp8" in (formats.moe_dispatch_fwd_dtype, formats.moe_combine_bwd_dtype)
