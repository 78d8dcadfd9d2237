"""For Megatron-LM's users: the data of a run from its arguments, and averages of losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core import parallel_state
from megatron_core.datasets.split_names import get_blend_from_list
from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.utils import unwrap_model

__all__ = ["average_losses_across_data_parallel_group", "get_blend_and_blend_per_split", "unwrap_model"]

_SPLITS = ("train", "valid", "test")
Blend = tuple[list[str], list[float] | None] | None


def get_blend_and_blend_per_split(args: Any) -> tuple[Blend, list[Blend] | None]:
    """``--data-path`` or its file as one blend, or ``--train-data-path`` ... or their file as one for each split.

    ``args`` has Megatron's attributes of these names; without any of them both results are None.
    """
    own = [getattr(args, f"{split}_data_path", None) for split in _SPLITS]
    if args.data_args_path is not None:
        if args.data_path is not None:
            raise ConfigError("data_path and data_args_path both say what to read; give one")
        return get_blend_from_list(Path(args.data_args_path).read_text().split()), None
    if args.data_path is not None:
        return get_blend_from_list(args.data_path), None
    if args.per_split_data_args_path is not None:
        given = json.loads(Path(args.per_split_data_args_path).read_text())
        own = [value.split() if isinstance(value := given[split], str) else value for split in _SPLITS]
    return None, [get_blend_from_list(paths) for paths in own] if any(own) else None


def average_losses_across_data_parallel_group(losses: list[Tensor]) -> Tensor:
    """The means ``[len(losses)]`` of scalars over the data parallel ranks."""
    group = parallel_state.get_data_parallel_group()
    total = torch.cat([loss.detach().clone().view(1) for loss in losses])
    all_reduce_(total, group)
    return total / group.size()
