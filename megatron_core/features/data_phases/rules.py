"""Rules of phases."""

from collections.abc import Iterator

from megatron_core.config import RunConfig
from megatron_core.features.data_phases.settings import DataPhasesConfig


def phase_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check that the samples are not repeated in epochs."""
    data = config.section(DataPhasesConfig)
    if data.data_phases is not None and data.dataloader_type == "cyclic" and not data.mock_data:
        yield (
            f"dataloader_type=cyclic repeats the samples of an epoch, but data_phases={data.data_phases} has no "
            "epochs; use single"
        )
