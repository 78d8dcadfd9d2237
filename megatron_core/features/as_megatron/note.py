"""The note at the start of a run that lists its differences from Megatron-LM."""

from collections.abc import Iterator
from typing import Any

from megatron_core.features.as_megatron.differences import training_differences
from megatron_core.training.compatibility import format_to_resume
from megatron_core.training.parts import RunPart


class DifferenceNote(RunPart):
    """Notes the differences of a run from scratch, or from a checkpoint of another program, in one line."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def notes(self) -> Iterator[str]:
        """The note; none for a run that resumes its own checkpoint, which would repeat it at every restart."""
        config = self.run.config
        resumes_own = self.run.loaded and format_to_resume(config.checkpoint.load) is None
        if resumes_own or config.checkpoint.load_hf is not None or config.training.skip_train:
            return
        chosen = [difference for difference in training_differences(config) if difference.settings]
        if chosen:
            names = ", ".join(difference.name for difference in chosen)
            yield f"differs from Megatron-LM: {names}; --as-megatron follows it, --dry-run explains"
