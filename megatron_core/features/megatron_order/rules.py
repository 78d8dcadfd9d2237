"""Rules of Megatron-LM's order of samples."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig
from megatron_core.features.megatron_order.settings import has_megatrons_order


def finite_order_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that contradict a finite order of samples."""
    data = config.data
    if has_megatrons_order(config) and data.phase_hooks:
        yield (
            f"data_phases={config.value('data_phases')} needs data_order=keyed, which can start at any sample; "
            "remove --data-order megatron"
        )
