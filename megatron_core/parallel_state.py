"""Megatron Core's names for the one layout of this process.

Everything here reads or sets the process's current ``ParallelGroups``; the arithmetic is in ``parallel.grid`` and the
groups are made in ``parallel.groups``. Getters of an axis that is not split work all the same: size 1, index 0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import product
from math import prod

import torch.distributed as dist

from megatron_core.config import ParallelConfig
from megatron_core.errors import LayoutError
from megatron_core.parallel import World
from megatron_core.parallel.current import current as current
from megatron_core.parallel.current import has_current
from megatron_core.parallel.current import set_current as set_current
from megatron_core.parallel.grid import DEFAULT_ORDER, Grid
from megatron_core.parallel.groups import Group, ParallelGroups

_virtual: dict[str, int | None] = {"rank": None, "size": None}


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Ranks that differ only on the axes whose ``mask`` is True; ``parallel_size`` has the sizes, the fastest first.

    Name and arguments are Megatron Core's.
    """
    strides = [prod(parallel_size[:axis]) for axis in range(len(parallel_size))]
    steps = [range(0, size * stride, stride) for size, stride in zip(parallel_size, strides, strict=True)]
    inner = [step for step, varies in zip(steps, mask, strict=True) if varies]
    outer = [step for step, varies in zip(steps, mask, strict=True) if not varies]
    outer.append(range(0, world_size, prod(parallel_size)))
    offsets = sorted(map(sum, product(*inner)))
    return [[first + offset for offset in offsets] for first in sorted(map(sum, product(*outer)))]


class RankGenerator:
    """Megatron Core's generator of one view of the ranks: ``get_ranks("tp-dp")`` lists the groups over those axes.

    With ``cp`` it is the view of dense layers and with ``ep`` that of experts, whose sizes are then ``tp`` and ``dp``.
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
        """Groups of ranks that differ only on the axes of ``token``."""
        mask = [axis in token.split("-") for axis in self.order]
        found = generate_masked_orthogonal_rank_groups(self.world_size, self._sizes, mask)
        return [[self.rank_offset + rank for rank in ranks] for ranks in found]


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    *,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    expert_model_parallel_size: int = 1,
    expert_tensor_parallel_size: int | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = DEFAULT_ORDER,
) -> None:
    """Build the process groups of a layout and make them current.

    ``expert_tensor_parallel_size`` is ``tensor_model_parallel_size`` unless given, see ``parallel.grid.Grid``;
    ``hierarchical_context_parallel_sizes`` are those of an a2a group and of a ring, as in ``ParallelConfig``.

    Errors: ``LayoutError`` (a ``RuntimeError``) when the world size does not fit or interleaving is asked for without a
    pipeline; ``AssertionError`` when torch.distributed is not initialised, or groups exist already.
    """
    assert dist.is_initialized(), (
        "torch.distributed is not initialized; call torch.distributed.init_process_group first"
    )
    assert not has_current(), "model parallel groups exist already; call destroy_model_parallel first"
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
        ep=expert_model_parallel_size,
        etp=expert_tensor_parallel_size,
        order=order,
    )
    levels = tuple(hierarchical_context_parallel_sizes or (1, context_parallel_size))
    if len(levels) != 2 or prod(levels) != context_parallel_size:
        raise LayoutError(
            f"hierarchical_context_parallel_sizes={list(levels)} are not two sizes whose product is "
            f"context_parallel_size={context_parallel_size}; correct or leave them out"
        )
    timeout = timedelta(minutes=distributed_timeout_minutes)
    set_current(ParallelGroups(grid, dist.get_rank(), a2a_size=levels[0], timeout=timeout))
    _virtual.update(rank=None, size=virtual_pipeline_model_parallel_size)


def make_groups(config: ParallelConfig, world: World, *, ends: tuple[int, int] = (0, -1)) -> ParallelGroups:
    """Build the groups of a configured layout, also for a process that is alone, and make them current.

    ``ends`` are the pipeline ranks of the first and the last stage.
    """
    timeout = timedelta(minutes=config.distributed_timeout_minutes)
    groups = ParallelGroups(
        grid_of(config, world.size),
        world.rank,
        ends=ends,
        instances=config.num_distributed_optimizer_instances,
        a2a_size=config.a2a_size,
        timeout=timeout,
    )
    world.prefix = groups.prefix if world.size > 1 else ""
    set_current(groups)
    return groups


def grid_of(config: ParallelConfig, world_size: int) -> Grid:
    """The ranks of a configured layout."""
    return Grid.fit(
        world_size,
        tp=config.tensor_model_parallel_size,
        cp=config.context_parallel_size,
        pp=config.pipeline_model_parallel_size,
        ep=config.expert_model_parallel_size,
        etp=config.expert_tensor_parallel_size,
        order=config.rank_order,
    )


def model_parallel_is_initialized() -> bool:
    """Whether a layout is current."""
    return has_current()


is_initialized = model_parallel_is_initialized


def destroy_model_parallel() -> None:
    """Forget the current layout."""
    set_current(None)
    _virtual.update(rank=None, size=None)


def _group_getter(axes: str, ranks: str) -> Callable[..., Group | None]:
    def group(check_initialized: bool = True) -> Group | None:
        return current().group(axes) if check_initialized or has_current() or not dist.is_initialized() else None

    group.__doc__ = f"""Ranks {ranks}; with ``check_initialized=False`` None while there are no groups yet."""
    return group


def _getters(axes: str, ranks: str) -> tuple[Callable[..., Group | None], Callable[[], int], Callable[[], int]]:
    """Megatron's three getters of the group over ``axes``: the group itself, its size and this rank's index in it."""

    def world_size() -> int:
        return current().group(axes).size()

    def rank() -> int:
        return current().group(axes).rank()

    world_size.__doc__ = f"Number of the ranks {ranks}."
    rank.__doc__ = f"This rank's index among the ranks {ranks}."
    return _group_getter(axes, ranks), world_size, rank


(
    get_tensor_model_parallel_group,
    get_tensor_model_parallel_world_size,
    get_tensor_model_parallel_rank,
) = _getters("tp", "that share each layer's matrices")
(
    get_pipeline_model_parallel_group,
    get_pipeline_model_parallel_world_size,
    get_pipeline_model_parallel_rank,
) = _getters("pp", "that share the layers")
(
    get_context_parallel_group,
    get_context_parallel_world_size,
    get_context_parallel_rank,
) = _getters("cp", "that share each sequence")
(
    get_tensor_and_context_parallel_group,
    get_tensor_and_context_parallel_world_size,
    get_tensor_and_context_parallel_rank,
) = _getters("tp-cp", "that share each sequence and each layer's matrices")
(
    get_expert_model_parallel_group,
    get_expert_model_parallel_world_size,
    get_expert_model_parallel_rank,
) = _getters("ep", "that share the experts of a layer")
(
    get_expert_tensor_parallel_group,
    get_expert_tensor_parallel_world_size,
    get_expert_tensor_parallel_rank,
) = _getters("etp", "that share each expert's matrices")
(
    get_expert_tensor_and_model_parallel_group,
    get_expert_tensor_and_model_parallel_world_size,
    get_expert_tensor_and_model_parallel_rank,
) = _getters("etp-ep", "that share the experts of a layer and each expert's matrices")
(
    get_expert_data_parallel_group,
    get_expert_data_parallel_world_size,
    get_expert_data_parallel_rank,
) = _getters("edp", "that hold copies of the same experts")
get_model_parallel_group = _group_getter("tp-pp", "that hold one copy of the model")
get_expert_tensor_model_pipeline_parallel_group = _group_getter("etp-ep-pp", "that hold one copy of all experts")


def get_tensor_model_parallel_src_rank() -> int:
    """Global rank of the first member of the tensor parallel group."""
    return current().ranks("tp")[0]


def get_model_parallel_src_rank() -> int:
    """Global rank of the first member of the model parallel group."""
    return current().ranks("tp-pp")[0]


def get_expert_model_parallel_src_rank() -> int:
    """Global rank of the first member of the expert parallel group."""
    return current().ranks("ep")[0]


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[Group] | None:
    """The context parallel group in two levels: ranks that exchange heads, and the ranks of a ring."""
    if not check_initialized and not has_current() and dist.is_initialized():
        return None
    return [current().context.heads, current().context.ring]


def get_context_parallel_global_ranks() -> list[int]:
    """Global ranks of the context parallel group."""
    return current().ranks("cp")


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
    """Ranks that hold copies of the same weights (and, without context parallel ones, of different sequences)."""
    return current().group("dp-cp" if with_context_parallel else "dp")


def get_data_parallel_world_size(with_context_parallel: bool = False) -> int:
    """Data parallel size."""
    return get_data_parallel_group(with_context_parallel).size()


def get_data_parallel_rank(with_context_parallel: bool = False) -> int:
    """This rank's index among them."""
    return get_data_parallel_group(with_context_parallel).rank()


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Global rank of the first member of the data parallel group."""
    return current().ranks("dp-cp" if with_context_parallel else "dp")[0]


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> Group | None:
    """Ranks of the same pipeline stage (and, without context parallel ones, of the same part of each sequence)."""
    return _group_getter("tp-dp-cp" if with_context_parallel else "tp-dp", "")(check_initialized)


def get_amax_reduction_group(with_context_parallel: bool = False, tp_only_amax_red: bool = False) -> Group | None:
    """Ranks over which FP8 takes the largest absolute value of a tensor."""
    axes = "tp" if tp_only_amax_red else "tp-dp"
    return current().group(f"{axes}-cp" if with_context_parallel else axes)


def get_embedding_group() -> Group | None:
    """First and last pipeline rank, which both hold a tied embedding; None on the ranks between them."""
    return current().embedding


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Whether this rank holds the embedding or its tied copy."""
    return is_pipeline_first_stage(ignore_virtual, vp_stage) or is_pipeline_last_stage(ignore_virtual, vp_stage)
