"""``megatron_core.parallel_state`` at Megatron's path, and Megatron's functions without a counterpart in the engine."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core import parallel_state
from megatron_core.drop_in.unsupported import unsupported
from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import DEFAULT_ORDER
from megatron_core.parallel_state import *  # noqa: F403
from megatron_core.parallel_state import (
    current,
    get_pipeline_model_parallel_rank,
    get_pipeline_model_parallel_world_size,
    model_parallel_is_initialized,
    set_current,
)

_SPLIT: dict[str, int | None] = {"rank": None}


def destroy_model_parallel() -> None:  # type: ignore[no-redef]  # in place of the engine's
    """Forget the current layout, the split of the pipeline and the global memory buffer."""
    parallel_state.destroy_model_parallel()
    set_pipeline_model_parallel_split_rank(None)
    destroy_global_memory_buffer()


def get_pipeline_model_parallel_split_rank() -> int | None:
    """Return the first pipeline rank of the decoder of an encoder-decoder model, if one was set."""
    return _SPLIT["rank"]


def set_pipeline_model_parallel_split_rank(rank: int | None) -> None:
    """Set the first pipeline rank of the decoder."""
    _SPLIT["rank"] = rank


def is_pipeline_stage_before_split(rank: int | None = None) -> bool:
    """Whether a pipeline rank, by default this one, has layers of the encoder; True without a split."""
    rank, split = get_pipeline_model_parallel_rank() if rank is None else rank, _SPLIT["rank"]
    return get_pipeline_model_parallel_world_size() == 1 or split is None or rank < split


def is_pipeline_stage_after_split(rank: int | None = None) -> bool:
    """Whether a pipeline rank, by default this one, has layers of the decoder; True without a split."""
    rank, split = get_pipeline_model_parallel_rank() if rank is None else rank, _SPLIT["rank"]
    return get_pipeline_model_parallel_world_size() == 1 or split is None or rank >= split


def is_pipeline_stage_at_split() -> bool:
    """Whether this rank has layers of the encoder and the next rank layers of the decoder."""
    rank = get_pipeline_model_parallel_rank()
    return is_pipeline_stage_before_split(rank) and is_pipeline_stage_after_split(rank + 1)


class GlobalMemoryBuffer:
    """Reusable memory by name and dtype, which grows on demand; a name has one user at a time."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> Tensor:
        """Return a tensor at the start of the memory of ``name``, on the current GPU if there is one."""
        size, key = prod(tensor_shape), (name, dtype)
        if key not in self.buffer or self.buffer[key].numel() < size:
            with (mem_alloc_context or nullcontext)():
                self.buffer[key] = torch.empty(size, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
        return self.buffer[key][:size].view(*tensor_shape)


_MEMORY = GlobalMemoryBuffer()


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the reusable memory of this process."""
    return _MEMORY


def destroy_global_memory_buffer() -> None:
    """Free the reusable memory."""
    _MEMORY.buffer.clear()


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Return the groups of ranks that differ only on the axes whose ``mask`` is True.

    ``parallel_size`` has the sizes of the axes, the fastest first.
    """
    whole, size = torch.arange(world_size).view(-1, *reversed(parallel_size)), len(parallel_size)
    varying = [size - axis for axis in reversed(range(size)) if mask[axis]]
    fixed = [dim for dim in range(size + 1) if dim not in varying]
    inner = prod(extent for extent, varies in zip(parallel_size, mask, strict=True) if varies)
    return whole.permute(*fixed, *varying).reshape(-1, inner).tolist()


class RankGenerator:
    """Lists the groups of one view of the ranks: ``get_ranks("tp-dp")`` returns the groups over these axes.

    With ``cp`` it is the view of dense layers and with ``ep`` the view of experts, with their sizes ``tp`` and ``dp``.
    """

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str = DEFAULT_ORDER, rank_offset: int = 0
    ) -> None:
        assert ep == 1 or cp == 1, f"ep={ep} and cp={cp} are axes of different views; one of them must be 1"
        sizes = {"tp": tp, "cp": cp, "ep": ep, "dp": dp, "pp": pp}
        self.rank_offset, self.world_size = rank_offset, prod(sizes.values())
        named = order.lower().split("-")
        for axis in sizes.keys() - set(named):
            if sizes[axis] != 1:
                raise LayoutError(f"order={order!r} lacks {axis!r}, whose size is {sizes[axis]}; add it")
        self.order = [*named, *(axis for axis in sizes if axis not in named)]
        self._sizes = [sizes[axis] for axis in self.order]

    def get_ranks(self, token: str) -> list[list[int]]:
        """Return the groups of ranks that differ only on the axes of ``token``."""
        mask = [axis in token.split("-") for axis in self.order]
        found = generate_masked_orthogonal_rank_groups(self.world_size, self._sizes, mask)
        return [[self.rank_offset + rank for rank in ranks] for ranks in found]


def create_all_gather_groups(
    for_expert_parallelism: bool = False, timeout: timedelta | None = None, nccl_comm_cfgs: Any = None
) -> tuple[Any, Any]:
    """Return further groups with the ranks of the data-parallel group with context, and of that of experts or None.

    A collective call. Programs gather weights in them while gradients are reduced in the others.
    """
    if not model_parallel_is_initialized():
        raise LayoutError("create_all_gather_groups: call initialize_model_parallel first")
    axes = ["dp-cp", *["edp"] * for_expert_parallelism]
    listed = [[list(ranks) for ranks in current().grid.constant_groups(axis)] for axis in axes]
    made = [dist.new_subgroups_by_enumeration(ranks, timeout=timeout)[0] for ranks in listed]
    return made[0], made[1] if for_expert_parallelism else None


get_hybrid_data_context_parallel_groups = unsupported(
    "hybrid_context_parallel is not supported in a program of your own; set context_parallel_size"
)
_PRIVATE: dict[str, Callable[[], Any]] = {
    "_MODEL_PARALLEL_GROUP": lambda: current().group("tp-pp"),
    "_TENSOR_MODEL_PARALLEL_GROUP": lambda: current().group("tp"),
    "_PIPELINE_MODEL_PARALLEL_GROUP": lambda: current().group("pp"),
    "_DATA_PARALLEL_GROUP": lambda: current().group("dp"),
    "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS": lambda: current().ranks("tp"),
    "_PIPELINE_GLOBAL_RANKS": lambda: current().ranks("pp"),
    "_DATA_PARALLEL_GLOBAL_RANKS": lambda: current().ranks("dp"),
}


def __getattr__(name: str) -> Any:
    """Return Megatron's private variables that programs read; None while there are no groups."""
    if name in _PRIVATE:
        return _PRIVATE[name]() if model_parallel_is_initialized() else None
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """The ranks of a pipeline that have word embeddings or the output layer: the first and the last."""
    return list(dict.fromkeys((pp_ranks[0], pp_ranks[-1])))


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """The ranks of a pipeline that have position embeddings: the first."""
    return [pp_ranks[0]]


def update_pg_timeout(timeout: timedelta, pg: Any = None) -> None:
    """Set the timeout of a process group, or of all groups of the layout."""
    groups = [pg]
    if pg is None:
        groups = [current().group(axes) for axes in ("tp", "cp", "pp", "ep", "etp", "edp", "dp-cp", "tp-pp")]
    for group in groups:
        if isinstance(group, dist.ProcessGroup):
            dist.distributed_c10d._set_pg_timeout(timeout, group)
