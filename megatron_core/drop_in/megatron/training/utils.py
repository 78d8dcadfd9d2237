"""The data of a run from its arguments, averages of losses, and printing."""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.utils import (
    get_batch_on_this_cp_rank,
    unwrap_model,
)
from megatron.core.utils import (
    get_batch_on_this_tp_rank as broadcast_batch,
)
from megatron_core import parallel_state
from megatron_core.errors import ConfigError
from megatron_core.parallel.collectives import all_reduce_

_SPLITS = ("train", "valid", "test")
Blend = tuple[list[str], list[float] | None] | None


def get_blend_and_blend_per_split(args: Any) -> tuple[Blend, list[Blend] | None]:
    """Return (one blend, None) or (None, a blend for each split) from the arguments.

    The first comes from ``--data-path`` or ``--data-args-path``, the second from ``--train-data-path`` ... or
    ``--per-split-data-args-path``. Without these both are None.
    """
    own = [getattr(args, f"{split}_data_path", None) for split in _SPLITS]
    if args.data_args_path is not None:
        if args.data_path:
            raise ConfigError("data_path and data_args_path exclude each other; give one of them")
        return get_blend_from_list(Path(args.data_args_path).read_text().split()), None
    if args.data_path:
        return get_blend_from_list(args.data_path), None
    if args.per_split_data_args_path is not None:
        given = json.loads(Path(args.per_split_data_args_path).read_text())
        own = [value.split() if isinstance(value := given[split], str) else value for split in _SPLITS]
    return None, [get_blend_from_list(paths) for paths in own] if any(own) else None


def get_batch_on_this_tp_rank(data_iterator: Any, *unused: Any, **others: Any) -> dict[str, Tensor | None]:
    """Return ``core.utils.get_batch_on_this_tp_rank`` of the next micro-batch; other ranks may pass None."""
    return broadcast_batch(None if data_iterator is None else next(data_iterator))


def average_losses_across_data_parallel_group(losses: list[Tensor]) -> Tensor:
    """Return the means ``[len(losses)]`` of scalars over the data-parallel ranks."""
    group = parallel_state.get_data_parallel_group()
    total = torch.cat([loss.detach().clone().view(1) for loss in losses])
    all_reduce_(total, group)
    return total / group.size()


def get_ltor_masks_and_position_ids(
    data: Tensor,
    eod_token: int,
    pad_token: int,
    reset_position_ids: bool,
    reset_attention_mask: bool,
    eod_mask_loss: bool,
    pad_mask_loss: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return attention mask, loss mask and positions of tokens ``[b, s]``.

    The attention mask is ``[b or 1, 1, s, s]``, True where a query must not see a key; the others are ``[b, s]``.
    Documents end with ``eod_token``; ``reset_...`` restarts after each.
    """
    batch, length = data.shape
    ends = data == eod_token
    document = ends.cumsum(1) - ends.long()  # an end belongs to its own document
    causal = torch.ones(length, length, dtype=torch.bool, device=data.device).triu(1)[None, None]
    other = (document[:, :, None] != document[:, None, :])[:, None]
    positions = torch.arange(length, device=data.device).expand(batch, -1)
    if reset_position_ids:
        begins = torch.zeros_like(positions)
        begins[:, 1:] = torch.where(ends[:, :-1], positions[:, 1:], 0)
        positions = positions - begins.cummax(1).values
    left_out = (ends & eod_mask_loss) | ((data == pad_token) & pad_mask_loss)
    return causal | other if reset_attention_mask else causal, (~left_out).float(), positions


def print_rank_0(message: Any, rank: int | None = None) -> None:
    """Print on rank 0; ``rank`` is this process's rank if the caller knows it."""
    if (rank if rank is not None else dist.get_rank() if dist.is_initialized() else 0) == 0:
        print(message, flush=True)


def print_rank_last(message: Any) -> None:
    """Print on the last rank, which has the loss."""
    if is_last_rank():
        print(message, flush=True)


def is_last_rank() -> bool:
    """Whether this is the last rank, which has the loss."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Whether this rank, or its chunk ``vp_stage``, reads tokens or labels."""
    stage = (False, vp_stage)
    return parallel_state.is_pipeline_first_stage(*stage) or parallel_state.is_pipeline_last_stage(*stage)
