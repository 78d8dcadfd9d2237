"""Megatron Core's functions for the layout of this process.

All functions read or set the process's current ``ParallelGroups``; the arithmetic is in ``parallel.grid``, and groups
are created in ``parallel.groups``. Getters of an axis that is not split return size 1 and index 0.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch.distributed as dist

from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.configured import grid_of as grid_of
from megatron_core.parallel.configured import make_groups as make_groups
from megatron_core.parallel.current import current as current
from megatron_core.parallel.current import has_current
from megatron_core.parallel.current import set_current as set_current
from megatron_core.parallel.grid import DEFAULT_ORDER, WORLD, Grid
from megatron_core.parallel.groups import Group, LocalGroup, ParallelGroups
from megatron_core.parallel.rank_local import RankLocal

assumed: RankLocal[dict[tuple[str, str], int]] = RankLocal(dict)
"""Sizes and indices set by ``set_*`` functions, by axes; getters return them instead of the group's."""
_virtual: dict[str, int | None] = {"rank": None, "size": None}


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    hybrid_context_parallel: bool = False,
    expert_model_parallel_size: int = 1,
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = DEFAULT_ORDER,
    get_embedding_ranks: Callable[..., list[int]] | None = None,
    get_position_embedding_ranks: Callable[..., list[int]] | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    rank_offset: int = 0,
    local_world_size: int | None = None,
) -> None:
    """Create the process groups of a layout and make them current.

    ``expert_tensor_parallel_size`` defaults to ``tensor_model_parallel_size``, see ``parallel.grid.Grid``;
    ``hierarchical_context_parallel_sizes`` are the sizes of an a2a group and of a ring, as in ``ParallelConfig``.
    ``create_gloo_process_groups`` and ``high_priority_stream_groups`` have no effect.

    Errors: ``LayoutError`` (a ``RuntimeError``) if the sizes do not fit the world size, or for interleaving without a
    pipeline; ``ConfigError`` for unsupported arguments; ``AssertionError`` if torch.distributed is not initialized or
    groups exist already.
    """
    assert dist.is_initialized(), (
        "torch.distributed is not initialized; call torch.distributed.init_process_group first"
    )
    _refuse(
        pipeline_model_parallel_comm_backend=pipeline_model_parallel_comm_backend,
        use_sharp=use_sharp,
        hybrid_context_parallel=hybrid_context_parallel,
        gtp_remat_size=gtp_remat_size != 1,
        expert_gtp_remat_size=expert_gtp_remat_size != 1,
        nccl_communicator_config_path=nccl_communicator_config_path,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        sharp_enabled_group=sharp_enabled_group,
        rank_offset=rank_offset,
        local_world_size=local_world_size not in (None, dist.get_world_size()),
    )
    if virtual_pipeline_model_parallel_size is not None and pipeline_model_parallel_size < 2:
        raise LayoutError(
            f"virtual_pipeline_model_parallel_size={virtual_pipeline_model_parallel_size} needs a pipeline, but "
            f"pipeline_model_parallel_size={pipeline_model_parallel_size}; use 2 or more, or omit it"
        )
    grid = Grid.fit(
        dist.get_world_size(),
        tp=tensor_model_parallel_size,
        cp=context_parallel_size,
        pp=pipeline_model_parallel_size,
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
    )
    levels = tuple(hierarchical_context_parallel_sizes or (1, context_parallel_size))
    if len(levels) != 2 or prod(levels) != context_parallel_size:
        raise LayoutError(
            f"hierarchical_context_parallel_sizes={list(levels)} must be two sizes whose product is "
            f"context_parallel_size={context_parallel_size}; correct or omit them"
        )
    assert not has_current(), "model parallel groups exist already; call destroy_model_parallel first"
    timeout = timedelta(minutes=distributed_timeout_minutes)
    instances = num_distributed_optimizer_instances
    set_current(ParallelGroups(grid, dist.get_rank(), instances=instances, a2a_size=levels[0], timeout=timeout))
    _virtual.update(rank=None, size=virtual_pipeline_model_parallel_size)


def _refuse(**unsupported: Any) -> None:
    for name, value in unsupported.items():
        if value:
            raise ConfigError(f"initialize_model_parallel: {name}={value!r} is not supported; omit it")


model_parallel_is_initialized = is_initialized = has_current


def destroy_model_parallel() -> None:
    """Clear the current layout."""
    set_current(None)
    _virtual.update(rank=None, size=None)
    assumed().clear()


def group_getter(axes: str, ranks: str) -> Callable[..., Group | None]:
    """Make the function that returns the group over ``axes``."""

    def group(check_initialized: bool = True) -> Group | None:
        return current().group(axes) if check_initialized or has_current() or not dist.is_initialized() else None

    group.__doc__ = f"""Ranks {ranks}; with ``check_initialized=False`` None while there are no groups yet."""
    return group


# One factory, because Megatron's getters of different groups differ only in the axes.
def getters(axes: str, ranks: str) -> tuple[Callable[..., Any], ...]:
    """Make Megatron's functions for the group over ``axes``: get the group, its size and this rank's index; set size
    and index without creating groups (None restores those of the group)."""

    def world_size() -> int:
        return assumed()[axes, "size"] if (axes, "size") in assumed() else current().group(axes).size()

    def rank() -> int:
        return assumed()[axes, "index"] if (axes, "index") in assumed() else current().group(axes).rank()

    def set_world_size(world_size: int | None) -> None:
        assume((axes, "size"), world_size)

    def set_rank(rank: int | None) -> None:
        assume((axes, "index"), rank)

    world_size.__doc__ = f"Number of the ranks {ranks}."
    rank.__doc__ = f"This rank's index among the ranks {ranks}."
    set_world_size.__doc__ = f"Assume a number of the ranks {ranks}; None: that of the groups."
    set_rank.__doc__ = f"Assume an index among the ranks {ranks}; None: that of the groups."
    return group_getter(axes, ranks), world_size, rank, set_world_size, set_rank


def assume(key: tuple[str, str], value: int | None) -> None:
    """Store a size or an index; None removes it."""
    assumed().pop(key, None)
    if value is not None:
        assumed()[key] = value


def rank_getter(axes: str, index: int, which: str) -> Callable[[], int]:
    """Make the function that returns a global rank of the group over ``axes``."""

    def rank() -> int:
        return current().ranks(axes)[index]

    rank.__doc__ = f"Global rank of the {which}."
    return rank


(
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_world_size,
    get_tensor_model_parallel_rank,
    set_tensor_model_parallel_world_size,
    set_tensor_model_parallel_rank,
) = getters("tp", "that share each layer's matrices")
(
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_world_size,
    get_pipeline_model_parallel_rank,
    set_pipeline_model_parallel_world_size,
    set_pipeline_model_parallel_rank,
) = getters("pp", "that share the layers")
(
    get_context_parallel_group,
    get_context_parallel_world_size,
    get_context_parallel_rank,
    set_context_parallel_world_size,
    set_context_parallel_rank,
) = getters("cp", "that share each sequence")
(
    get_tensor_and_context_parallel_group,
    get_tensor_and_context_parallel_world_size,
    get_tensor_and_context_parallel_rank,
    set_tensor_and_context_parallel_world_size,
    set_tensor_and_context_parallel_rank,
) = getters("tp-cp", "that share each sequence and each layer's matrices")
(
    get_expert_model_parallel_group,
    get_expert_model_parallel_world_size,
    get_expert_model_parallel_rank,
    set_expert_model_parallel_world_size,
    set_expert_model_parallel_rank,
) = getters("ep", "that share the experts of a layer")
(
    get_expert_tensor_parallel_group,
    get_expert_tensor_parallel_world_size,
    get_expert_tensor_parallel_rank,
    set_expert_tensor_parallel_world_size,
    set_expert_tensor_parallel_rank,
) = getters("etp", "that share each expert's matrices")
(
    get_expert_tensor_and_model_parallel_group,
    get_expert_tensor_and_model_parallel_world_size,
    get_expert_tensor_and_model_parallel_rank,
    set_expert_tensor_and_model_parallel_world_size,
    set_expert_tensor_and_model_parallel_rank,
) = getters("etp-ep", "that share the experts of a layer and each expert's matrices")
get_expert_data_parallel_world_size, get_expert_data_parallel_rank = getters(
    "edp", "that hold copies of the same experts"
)[1:3]
get_model_parallel_group = group_getter("tp-pp", "that hold one copy of the model")
get_expert_tensor_model_pipeline_parallel_group = group_getter("etp-ep-pp", "that hold one copy of all experts")

get_tensor_model_parallel_src_rank = rank_getter("tp", 0, "first member of the tensor parallel group")
get_model_parallel_src_rank = rank_getter("tp-pp", 0, "first member of the model parallel group")
get_expert_model_parallel_src_rank = rank_getter("ep", 0, "first member of the expert parallel group")
get_pipeline_model_parallel_first_rank = rank_getter("pp", 0, "first stage")
get_pipeline_model_parallel_last_rank = rank_getter("pp", -1, "last stage")


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Group] | None:
    """The context parallel group in two levels: ranks that exchange heads, and ranks of a ring."""
    if not check_initialized and not has_current() and dist.is_initialized():
        return None
    return [current().context.heads, current().context.ring]


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the context parallel group."""
    return current().ranks("cp")


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
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1 and _chunk_is(
        last_chunk, ignore_virtual, vp_stage
    )


def _chunk_is(chunk: int, ignore_virtual: bool, vp_stage: int | None) -> bool:
    if ignore_virtual or _virtual["size"] is None:
        return True
    return (vp_stage if vp_stage is not None else _virtual["rank"]) == chunk


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """The current chunk, or None."""
    return _virtual["rank"]


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the current chunk."""
    _virtual["rank"] = rank


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Number of chunks per pipeline rank, or None without interleaving."""
    return _virtual["size"]


def set_virtual_pipeline_model_parallel_world_size(size: int | None) -> None:
    """Set the number of chunks."""
    _virtual["size"] = size


def get_data_parallel_group(
    with_context_parallel: bool = False, with_gtp_remat: bool = True, partial_data_parallel: bool = False
) -> Group:
    """Ranks that hold copies of the same weights (without context parallel ranks: of different sequences).

    ``partial_data_parallel``: only those of one instance of the distributed optimizer.
    """
    axes = "dp-cp" if with_context_parallel else "dp"
    return current().shard_group(axes) if partial_data_parallel else current().group(axes)


def get_data_parallel_group_gloo(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Group:
    """The same ranks; there is a single group, with torch.distributed's backend."""
    return get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel)


def get_data_parallel_world_size(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """Data parallel size."""
    return get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel).size()


def get_data_parallel_rank(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> int:
    """This rank's index in the data parallel group."""
    group = get_data_parallel_group(with_context_parallel, partial_data_parallel=partial_data_parallel)
    return assumed().get(("dp", "index"), group.rank())


def set_data_parallel_rank(rank: int | None) -> None:
    """Assume an index among the data parallel ranks; None restores that of the groups."""
    assume(("dp", "index"), rank)


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of the data parallel group."""
    return current().ranks("dp-cp" if with_context_parallel else "dp")[0]


def get_expert_data_parallel_group(
    check_initialized: bool = True, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> Group | None:
    """Ranks that hold copies of the same experts: all, or those of one instance of the distributed optimizer."""
    if partial_expert_data_parallel and (check_initialized or has_current()):
        return current().shard_group("edp")
    return group_getter("edp", "")(check_initialized)


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> Group | None:
    """Ranks that together hold one copy of the optimizer's state; with one instance all ranks."""
    return group_getter(WORLD, "")(check_initialized) if _instances(check_initialized) == 1 else None


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> Group | None:
    """Ranks that hold the same shard in the instances of the distributed optimizer."""
    return current().instance_group("dp-cp") if _instances(check_initialized) else None


def _instances(check_initialized: bool) -> int:
    return current().instance_group("dp-cp").size() if check_initialized or has_current() else 0


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Group | None:
    """Ranks of the same pipeline stage (without context parallel ranks: of the same part of each sequence)."""
    return group_getter("tp-dp-cp" if with_context_parallel else "tp-dp", "")(check_initialized)


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Group | None:
    """Ranks over which FP8 computes the amax of a tensor."""
    axes = "tp" if tp_only_amax_red else "tp-dp"
    return current().group(f"{axes}-cp" if with_context_parallel else axes)


def get_embedding_group(check_initialized: bool = True) -> Group | None:
    """The first and the last pipeline rank, which both hold a tied embedding; None on other ranks."""
    return current().embedding if check_initialized or has_current() else None


def get_position_embedding_group(check_initialized: bool = True) -> Group | None:
    """The first pipeline rank, which holds the position embedding; None on other ranks."""
    if not (check_initialized or has_current()) or not is_rank_in_position_embedding_group():
        return None
    return LocalGroup()


def is_rank_in_position_embedding_group() -> bool:
    """Whether this rank holds the position embedding."""
    return get_pipeline_model_parallel_rank() == 0


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the embedding or its tied copy."""
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(ignore_virtual, vp_stage)


def get_all_ranks() -> str:
    """This rank's indices on tp, dp, cp, pp and ep, joined by underscores."""
    groups = current()
    return "_".join(str(groups.index(axis)) for axis in ("tp", "dp", "cp", "pp", "ep"))
