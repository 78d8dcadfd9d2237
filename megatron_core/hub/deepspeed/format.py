"""Recognition of DeepSpeed's checkpoints in folders of settings."""

import shlex
from pathlib import Path

from megatron_core.checkpoint.formats import CheckpointFormat
from megatron_core.hub.deepspeed.folder import is_deepspeed_folder


class DeepSpeedFormat(CheckpointFormat):
    """Checkpoints of DeepSpeed: only conversion and the engine for models of users read them."""

    def is_in(self, folder: Path) -> bool:
        """Whether the folder has files of the format."""
        return is_deepspeed_folder(folder)

    def refusal(self, named: str, folder: Path, step: int | None = None) -> str:
        """The command that converts the folder."""
        source = shlex.quote(str(folder))
        target = shlex.quote(f"{folder.absolute()}-converted")
        return (
            f"{named} is a checkpoint of DeepSpeed; run megatron-convert --from deepspeed --to hf --load {source} "
            f"--save {target}, then give --load-hf {target} (--to native is for megatron_core.initialize)"
        )
