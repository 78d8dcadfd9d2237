"""The data of a run from its arguments, averages of losses, sizes, norms, and printing."""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core._rank_utils import of_environment, resolve_slurm_local_rank, safe_get_rank
from megatron.core.datasets.blended_megatron_dataset_builder import get_blend_from_list
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.utils import get_batch_on_this_cp_rank, nvtx_range_pop, nvtx_range_push, unwrap_model
from megatron.core.utils import get_batch_on_this_tp_rank as broadcast_batch
from megatron.training.global_vars import get_args, get_timers
from megatron_core import parallel_state
from megatron_core.config import DataConfig
from megatron_core.datasets.paths import read_paths
from megatron_core.errors import ConfigError
from megatron_core.parallel import World
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group

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
        blend = read_paths(DataConfig(data_args_path=args.data_args_path)).phases[0].data_path
        return get_blend_from_list(list(blend)), None
    if args.data_path:
        return get_blend_from_list(args.data_path), None
    if args.per_split_data_args_path is not None:
        by_split = read_paths(DataConfig(per_split_data_args_path=args.per_split_data_args_path)).by_split
        own = [list(paths) or None for paths in by_split]
    return None, [get_blend_from_list(paths) for paths in own] if any(own) else None


def get_batch_on_this_tp_rank(data_iterator: Any, *unused: Any, **others: Any) -> dict[str, Tensor | None]:
    """Return ``core.utils.get_batch_on_this_tp_rank`` of the next micro-batch; other ranks may pass None."""
    return broadcast_batch(None if data_iterator is None else next(data_iterator))


def average_losses_across_data_parallel_group(losses: list[Tensor], group: Group | None = None) -> Tensor:
    """Return the means ``[len(losses)]`` of scalars over the ranks of ``group``, by default the data-parallel one."""
    group = group or parallel_state.get_data_parallel_group()
    total = torch.cat([loss.detach().clone().view(1) for loss in losses])
    all_reduce_(total, group)
    return total / group.size()


def _model_parallel(group: Group | None) -> Group:
    found = group or parallel_state.get_model_parallel_group()
    assert found is not None, "the getter raises without groups"
    return found


def reduce_max_stat_across_model_parallel_group(stat: float | None, group: Group | None = None) -> float | None:
    """Return the maximum of a number >= 0 over the model-parallel ranks, of which some may have None; None if all."""
    value = torch.tensor([-1.0 if stat is None else stat], device=World.from_environment().device)
    all_reduce_(value, _model_parallel(group), maximum=True)
    return None if value.item() == -1.0 else value.item()


def logical_and_across_model_parallel_group(input: bool, group: Group | None = None) -> bool:
    """Whether ``input`` is True on all model-parallel ranks."""
    failed = torch.tensor([int(input is not True)], device=World.from_environment().device)
    all_reduce_(failed, _model_parallel(group), maximum=True)
    return not failed.item()


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


def warn_rank_0(message: str, rank: int | None = None) -> None:
    """Warn on rank 0; ``rank`` is this process's rank if the caller knows it."""
    if (safe_get_rank() if rank is None else rank) == 0:
        warnings.warn(message, stacklevel=2)


def is_rank0() -> bool:
    """Whether this is rank 0."""
    return safe_get_rank() == 0


def get_local_rank_preinit() -> int:
    """Return the rank on this machine: LOCAL_RANK, else SLURM_LOCALID, else 0 with a warning."""
    return of_environment("LOCAL_RANK", resolve_slurm_local_rank(), 0, "local rank")


def is_hybrid_model(args: Any) -> bool:
    """Whether the arguments describe a hybrid model, which is not supported."""
    return getattr(args, "hybrid_layer_pattern", None) is not None


def is_gtp_remat_active(args: Any) -> bool:
    """Whether weights are gathered for each layer; never, because the flags for it are not supported."""
    return any(getattr(args, f"{kind}gtp_weight_remat_size", 1) > 1 for kind in ("", "expert_"))


def get_device_arch_version() -> int:
    """Return the major number of the first GPU's compute capability."""
    return torch.cuda.get_device_properties(torch.device("cuda:0")).major


def update_use_dist_ckpt(args: Any) -> None:
    """Set ``args.use_dist_ckpt``: every format but ``torch`` is written by all ranks."""
    args.use_dist_ckpt = args.ckpt_format != "torch"


def get_nvtx_range() -> Callable[..., AbstractContextManager[None]]:
    """Return a context manager ``(msg, time=False, log_level=1)``: a range of the profiler and, if asked, a timer."""

    @contextmanager
    def nvtx_range(msg: str, time: bool = False, log_level: int = 1) -> Iterator[None]:
        timer = get_timers()(msg, log_level=log_level) if time else None
        if timer is not None:
            timer.start()
        nvtx_range_push(msg)
        try:
            yield
        finally:
            nvtx_range_pop(msg)
            if timer is not None:
                timer.stop()

    return nvtx_range


def report_memory(name: str, process_group: Group | None = None) -> None:
    """Print the memory of this rank's GPU in MiB on the first data-parallel rank."""
    kinds = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    sizes = [f"{kind.replace('_', ' ')}: {getattr(torch.cuda, kind)() / 2**20:.2f}" for kind in kinds]
    if (process_group or parallel_state.get_data_parallel_group()).rank() == 0:
        rank = dist.get_rank() if dist.is_initialized() else 0
        print(f"[Rank {rank}] {name} memory (MB) | {' | '.join(sizes)}", flush=True)


def is_last_rank() -> bool:
    """Whether this is the last rank, which has the loss."""
    return not dist.is_initialized() or dist.get_rank() == dist.get_world_size() - 1


def is_first_or_last_pipeline_stage(vp_stage: int | None = None) -> bool:
    """Whether this rank, or its chunk ``vp_stage``, reads tokens or labels."""
    stage = (False, vp_stage)
    return parallel_state.is_pipeline_first_stage(*stage) or parallel_state.is_pipeline_last_stage(*stage)


def calc_params_l2_norm(model: nn.Module | list[Any], force_create_fp32_copy: bool = False) -> float:
    """Return the square root of the sum of squares of all weights, each counted once over the model-parallel ranks.

    Sums are in float64. Weights that tensor-parallel ranks or tied stages hold as copies are counted on the first.
    ``force_create_fp32_copy`` has no effect.
    """
    tp, expert_tp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    groups = parallel_state.get_model_parallel_group(), parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    sums = torch.zeros(2, dtype=torch.float64, device=World.from_environment().device)
    for parameter in (each for chunk in (model if isinstance(model, list) else [model]) for each in chunk.parameters()):
        first = param_is_not_tensor_parallel_duplicate(parameter, tp, expert_tp)
        if first and not getattr(parameter, "shared", False):
            is_expert = int(not getattr(parameter, "allreduce", True))
            sums[is_expert] += parameter.detach().to(sums).square().sum()
    for index, group in enumerate(groups):
        assert group is not None, "the getters above raise without groups"
        all_reduce_(sums[index : index + 1], group)
    return math.sqrt(sums.sum().item())


def calculate_padded_vocab_size(
    vocab_size: int, make_vocab_size_divisible_by: int, tensor_model_parallel_size: int, logging_enabled: bool = True
) -> int:
    """Return the size rounded up to a multiple of make_vocab_size_divisible_by x tensor_model_parallel_size."""
    sizes = {
        "vocab_size": vocab_size,
        "make_vocab_size_divisible_by": make_vocab_size_divisible_by,
        "tensor_model_parallel_size": tensor_model_parallel_size,
    }
    for name, size in sizes.items():
        if size <= 0:
            raise ConfigError(f"{name} must be positive, but it is {size}")
    unit = make_vocab_size_divisible_by * tensor_model_parallel_size
    padded = -(-vocab_size // unit) * unit
    if logging_enabled:
        print_rank_0(
            f" > padded vocab (size: {vocab_size}) with {padded - vocab_size} dummy tokens (new size: {padded})"
        )
    return padded
