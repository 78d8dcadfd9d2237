"""Size of the key-value cache."""

from pathlib import Path

import torch

from megatron_core.errors import ConfigError
from megatron_core.inference.generator import Generator
from megatron_core.inference.settings import InferenceConfig
from megatron_core.monitor.device import total_memory_bytes
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD

MEMINFO = Path("/proc/meminfo")
MOST_POSITIONS = 2**31
"""Upper bound for a model whose positions and memory are not limited."""


def cache_blocks(config: InferenceConfig, generator: Generator, texts: int) -> int:
    """Number of blocks for which every rank has memory in addition to the states of ``texts`` texts; a collective call.

    Errors: ``ConfigError`` if there is not memory for one block.
    """
    group = generator.groups.group(WORLD)
    device = generator.device
    size = config.inference_dynamic_batching_block_size * generator.bytes_per_position
    limit = config.inference_dynamic_batching_buffer_size_gb
    free = _free_bytes(device) / 2 / (1 if device.type == "cuda" else group.size())
    states = texts * generator.bytes_per_text
    memory = max(free - states, 0) if limit is None else limit * 1e9
    blocks = int(min(memory // max(size, 1), MOST_POSITIONS // config.inference_dynamic_batching_block_size))
    # The smallest number of all ranks.
    least = torch.tensor([-blocks], dtype=torch.int64, device=device)
    all_reduce_(least, group, maximum=True)
    if not least.item():
        if limit is None and free - states < size <= free:
            raise ConfigError(
                f"max_batch_size={texts}: states of {texts} texts need {states / 1e9:.3g} GB on rank "
                f"{group.rank()}, where {free / 1e9:.3g} GB hold them and the key-value cache; use a smaller "
                "--max-batch-size"
            )
        setting = "inference_dynamic_batching_buffer_size_gb"
        raise ConfigError(
            f"{setting}={limit} does not hold one block of {config.inference_dynamic_batching_block_size} positions, "
            f"{size / 1e9:.3g} GB on rank {group.rank()}; give more, or a smaller inference_dynamic_batching_block_size"
        )
    return -int(least.item())


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = dict(line.split(":", 1) for line in MEMINFO.read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):  # not Linux
        return total_memory_bytes()
