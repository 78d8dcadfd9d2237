"""The setting of phases, and its rule."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import RunConfig
from megatron_core.config.data import DataConfig
from megatron_core.config.setting import BY_RULE, Resume, section, setting


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.REPORTED)
class DataPhasesConfig(DataConfig):
    """Blends one after another."""

    data_phases: str | None = setting(None, when=BY_RULE)
    """YAML file with a sequence of blends: a list of {samples: N, data_path: [...]}, the last one without samples. A
    data file that occurs in several phases continues after the samples already used."""

    @property
    def divided_sources(self) -> list[str]:
        """See ``DataConfig``."""
        return [*super().divided_sources, *["data_phases"] * bool(self.data_phases)]

    @property
    def phase_hooks(self) -> str:
        """See ``DataConfig``."""
        return "" if self.data_phases is None else "megatron_core.features.data_phases.phases"


def phase_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check that the samples are not repeated in epochs."""
    data = config.section(DataPhasesConfig)
    if data.data_phases is not None and data.dataloader_type == "cyclic" and not data.mock_data:
        yield (
            f"dataloader_type=cyclic repeats the samples of an epoch, but data_phases={data.data_phases} has no "
            "epochs; use single"
        )
