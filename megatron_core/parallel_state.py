"""Megatron Core's names for the one layout of this process.

Everything here reads or sets the process's current ``ParallelGroups``; the arithmetic is in ``parallel.grid`` and the
groups are made in ``parallel.groups``. Getters of an axis that is not split work all the same: size 1, index 0.
"""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from megatron_core.config import ParallelConfig
from megatron_core.errors import LayoutError
from megatron_core.parallel import World
from megatron_core.parallel.grid import DEFAULT_ORDER, Grid
from megatron_core.parallel.grid import generate_masked_orthogonal_rank_groups as generate_masked_orthogonal_rank_groups
from megatron_core.parallel.groups import Group, ParallelGroups

_current: list[ParallelGroups] = []
_virtual: dict[str, int | None] = {"rank": None, "size": None}


class RankGenerator:
    """Megatron Core's view of a ``Grid``: ``get_ranks("tp-dp")`` lists the groups over those axes."""

    def __init__(
        self, tp: int, ep: int, dp: int, pp: int, cp: int, order: str = DEFAULT_ORDER, rank_offset: int = 0
    ) -> None:
        self.grid = Grid(tp=tp, cp=cp, ep=ep, dp=dp, pp=pp, order=order, rank_offset=rank_offset)
        self.world_size = self.grid.world_size

    def get_ranks(self, token: str) -> list[list[int]]:
        """Groups of ranks that differ only on the axes of ``token``."""
        return self.grid.groups(token)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    expert_model_parallel_size: int = 1,
    distributed_timeout_minutes: float = 30,
    order: str = DEFAULT_ORDER,
) -> None:
    """Build the process groups of a layout and make them current.

    Errors: ``LayoutError`` (a ``RuntimeError``) when the world size does not fit or interleaving is asked for without a
    pipeline; ``AssertionError`` when torch.distributed is not initialised, or groups exist already.
    """
    assert dist.is_initialized(), (
        "torch.distributed is not initialized; call torch.distributed.init_process_group first"
    )
    assert not _current, "model parallel groups exist already; call destroy_model_parallel first"
    for name, size in (
        ("context_parallel_size", context_parallel_size),
        ("expert_model_parallel_size", expert_model_parallel_size),
    ):
        if size != 1:
            raise LayoutError(f"{name}={size} is not supported yet; legal: 1")
    if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size < 2:
        raise LayoutError(
            f"virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size} needs a pipeline, but "
            f"pipeline_model_parallel_size={pipeline_model_parallel_size}; use 2 or more, or leave it out"
        )
    grid = Grid.fit(
        dist.get_world_size(),
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        pp=pipeline_model_parallel_size,
        order=order,
    )
    set_current(ParallelGroups(grid, dist.get_rank(), timeout=timedelta(minutes=distributed_timeout_minutes)))
    _virtual.update(rank=None, size=virtual_pipeline_model_parallel_size)


def make_groups(config: ParallelConfig, world: World, *, ends: tuple[int, int] = (0, -1)) -> ParallelGroups:
    """Build the groups of a configured layout, also for a process that is alone, and make them current.

    ``ends`` are the pipeline ranks of the first and the last stage.
    """
    grid = Grid.fit(
        world.size,
        tp=config.tensor_model_parallel_size,
        cp=config.context_parallel_size,
        pp=config.pipeline_model_parallel_size,
        order=config.rank_order,
    )
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    groups = ParallelGroups(grid, world.rank, ends=ends, timeout=timeout)
    world.prefix = groups.prefix if world.size > 1 else ""
    set_current(groups)
    return groups


def set_current(groups: ParallelGroups) -> None:
    """Make ``groups`` the layout of this process."""
    _current[:] = [groups]


def current() -> ParallelGroups:
    """The layout of this process; a process without torch.distributed stands alone."""
    if not _current:
        if dist.is_initialized():
            raise LayoutError("no model parallel groups yet; call parallel_state.initialize_model_parallel first")
        return ParallelGroups.single()
    return _current[0]


def model_parallel_is_initialized() -> bool:
    """Whether a layout is current."""
    return bool(_current)


is_initialized = model_parallel_is_initialized


def destroy_model_parallel() -> None:
    """Forget the current layout."""
    _current.clear()
    _virtual.update(rank=None, size=None)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> Group:
    """Ranks that share each layer's matrices."""
    return current().group("tp")


def get_tensor_model_parallel_world_size() -> int:
    """Tensor parallel size."""
    return current().size("tp")


def get_tensor_model_parallel_rank() -> int:
    """This rank's place on the tensor parallel axis."""
    return current().index("tp")


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of the tensor parallel group."""
    return current().ranks("tp")[0]


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> Group:
    """Ranks that share the layers."""
    return current().group("pp")


def get_pipeline_model_parallel_world_size() -> int:
    """Pipeline size."""
    return current().size("pp")


def get_pipeline_model_parallel_rank() -> int:
    """This rank's place in the pipeline."""
    return current().index("pp")


def get_pipeline_model_parallel_first_rank() -> int:
    """Global rank of the first stage."""
    return current().ranks("pp")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Global rank of the last stage."""
    return current().ranks("pp")[-1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Global rank of the next stage, the first after the last."""
    return _pipeline_neighbour(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Global rank of the previous stage, the last before the first."""
    return _pipeline_neighbour(-1)


def _pipeline_neighbour(step: int) -> int:
    ranks = current().ranks("pp")
    return ranks[(current().index("pp") + step) % len(ranks)]


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (and, unless ignored, this chunk) is the first of the pipeline."""
    return get_pipeline_model_parallel_rank() == 0 and _chunk_is(0, ignore_virtual, vp_stage)


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank (and, unless ignored, this chunk) is the last of the pipeline."""
    last_chunk = (_virtual["size"] or 1) - 1
    return get_pipeline_model_parallel_rank() == current().size("pp") - 1 and _chunk_is(
        last_chunk, ignore_virtual, vp_stage
    )


def _chunk_is(chunk: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    if ignore_virtual or _virtual["size"] is None:
        return True
    return (vp_stage if vp_stage is not None else _virtual["rank"]) == chunk


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The chunk that was last set, or None."""
    return _virtual["rank"]


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the current chunk."""
    _virtual["rank"] = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Chunks on each pipeline rank, or None without interleaving."""
    return _virtual["size"]


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Set the number of chunks."""
    _virtual["size"] = size


def get_data_parallel_group(with_context_parallel: bool = False) -> Group:
    """Ranks that hold copies of the same weights."""
    return current().group("dp-cp" if with_context_parallel else "dp")


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Data parallel size."""
    return get_data_parallel_group(with_context_parallel).size()


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """This rank's place on the data parallel axis."""
    return get_data_parallel_group(with_context_parallel).rank()


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of the data parallel group."""
    return current().ranks("dp-cp" if with_context_parallel else "dp")[0]


def get_context_parallel_group(check_initialized: bool = True) -> Group:
    """Ranks that share each sequence."""
    return current().group("cp")


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the context parallel group."""
    return current().ranks("cp")


def get_context_parallel_world_size() -> int:
    """Context parallel size."""
    return current().size("cp")


def get_context_parallel_rank() -> int:
    """This rank's place on the context parallel axis."""
    return current().index("cp")


def get_model_parallel_group() -> Group:
    """Ranks that hold one copy of the model."""
    return current().group("tp-pp")


def get_tensor_and_data_parallel_group(with_context_parallel: bool = False) -> Group:
    """Ranks of the same pipeline stage."""
    return current().group("tp-dp-cp" if with_context_parallel else "tp-dp")


def get_tensor_and_context_parallel_group() -> Group:
    """Ranks that share the same sequence and layers."""
    return current().group("tp-cp")


def get_embedding_group() -> Group | None:
    """First and last pipeline rank, which both hold a tied embedding; None on the ranks between them."""
    return current().embedding


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the embedding or its tied copy."""
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(ignore_virtual, vp_stage)
