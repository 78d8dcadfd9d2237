"""Settings of checkpoints that a thread writes."""

from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config.checkpoint import CheckpointConfig
from megatron_core.config.setting import section, setting


@dataclass(frozen=True, kw_only=True)
@section()
class BackgroundSavesConfig(CheckpointConfig):
    """Checkpoints in the background."""

    async_save: bool = setting(False, needs=c.SAVE, when=c.TRAINING, is_refinement=True)
    """Copy checkpoints to the host's memory and write them in the background during the next steps."""
