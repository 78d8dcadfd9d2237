"""Messages between tokens and experts in 8 bits (MXFP8)."""

from megatron_core.feature import Feature
from megatron_core.features.mxfp8_messages.settings import MXFP8MessagesConfig, sends_mxfp8

MXFP8_MESSAGES = Feature(
    name="mxfp8_messages",
    settings=MXFP8MessagesConfig,
    is_used=sends_mxfp8,
    change_stage="megatron_core.features.mxfp8_messages.messages:send_mxfp8",
)
