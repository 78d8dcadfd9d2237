"""Settings of Megatron-LM's order of samples, and their rule."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import ranges as r
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Condition, Resume, section, setting

MEGATRONS_ORDER = Condition("--data-order megatron", lambda run: run.data.data_order == "megatron")


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.REPORTED)
class MegatronOrderConfig:
    """Read samples in Megatron-LM's order."""

    data_cache_path: str | None = setting(None, r.FOLDER, when=MEGATRONS_ORDER, resume=Resume.FREE)
    """Folder for the index files of --data-order megatron; default: they are not stored."""
    mid_level_dataset_surplus: float = setting(0.005, r.from_0(2**16), when=MEGATRONS_ORDER)
    """With --data-order megatron: additional samples drawn from each file of a blend, relative to its share."""


def has_megatrons_order(config: RunConfig) -> bool:
    """Whether a run reads samples in Megatron-LM's order."""
    return config.data.data_order == "megatron"


def finite_order_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that contradict a finite order of samples."""
    data = config.data
    if has_megatrons_order(config) and data.phase_hooks:
        yield (
            f"data_phases={config.value('data_phases')} needs data_order=keyed, which can start at any sample; "
            "remove --data-order megatron"
        )
