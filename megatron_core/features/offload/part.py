"""The place of offloaded optimizer state, which a run prints at its start."""

from collections.abc import Iterator
from typing import Any

from megatron_core.training.parts import RunPart


class OffloadPart(RunPart):
    """Describes files of optimizer state."""

    def __init__(self, run: Any) -> None:
        self.settings = run.config.optimizer

    def descriptions(self) -> Iterator[str]:
        """Yield the folder and its share of the state, if it is on disk."""
        folder = self.settings.optimizer_offload_dir
        if folder is not None:
            share = f"{self.settings.optimizer_offload_fraction:.0%}"
            yield (
                f"optimizer state and main weights: {share} in unnamed files of {folder}, which are deleted with the "
                "process"
            )
