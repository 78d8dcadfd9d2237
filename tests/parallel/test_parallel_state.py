"""Megatron's getters agree with the grid's arithmetic."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_core import parallel_state as mpu
from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import DEFAULT_ORDER, Grid
from megatron_core.parallel.groups import LocalGroup
from megatron_core.verify.ranks import run_ranks

AXIS_GETTERS = {
    "tp": "tensor_model_parallel",
    "cp": "context_parallel",
    "dp": "data_parallel",
    "pp": "pipeline_model_parallel",
    "etp": "expert_tensor_parallel",
    "ep": "expert_model_parallel",
    "edp": "expert_data_parallel",
}


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _check_getters(grid: Grid) -> None:
    me = dist.get_rank()
    at = grid.coordinates(me)
    tensor, pipeline, data = (grid.group_of(me, axis) for axis in ("tp", "pp", "dp"))
    groups = {
        "tp": mpu.get_tensor_model_parallel_group(),
        "pp": mpu.get_pipeline_model_parallel_group(),
        "dp": mpu.get_data_parallel_group(),
        "dp-cp": mpu.get_data_parallel_group(with_context_parallel=True),
        "cp": mpu.get_context_parallel_group(),
        "tp-pp": mpu.get_model_parallel_group(),
        "tp-dp": mpu.get_tensor_and_data_parallel_group(),
        "tp-dp-cp": mpu.get_tensor_and_data_parallel_group(with_context_parallel=True),
        "tp-cp": mpu.get_tensor_and_context_parallel_group(),
        "ep": mpu.get_expert_model_parallel_group(),
        "etp": mpu.get_expert_tensor_parallel_group(),
        "etp-ep": mpu.get_expert_tensor_and_model_parallel_group(),
        "etp-ep-pp": mpu.get_expert_tensor_model_pipeline_parallel_group(),
        "edp": mpu.get_expert_data_parallel_group(),
    }
    for axes, group in groups.items():
        assert _ranks(group) == grid.group_of(me, axes), axes
    for axis, getters in AXIS_GETTERS.items():
        assert [getattr(mpu, f"get_{getters}_{what}")() for what in ("world_size", "rank")] == [
            grid.size(axis),
            at[axis],
        ]
    stage = grid.group_of(me, "etp-ep")
    assert mpu.get_expert_tensor_and_model_parallel_world_size() == len(stage)
    assert mpu.get_expert_tensor_and_model_parallel_rank() == stage.index(me)
    for with_cp, tp_only, axes in ((0, 0, "tp-dp"), (1, 0, "tp-dp-cp"), (0, 1, "tp"), (1, 1, "tp-cp")):
        assert _ranks(mpu.get_amax_reduction_group(bool(with_cp), bool(tp_only))) == grid.group_of(me, axes)
    assert mpu.get_context_parallel_global_ranks() == grid.group_of(me, "cp")
    assert mpu.get_expert_model_parallel_src_rank() == grid.group_of(me, "ep")[0]
    assert mpu.get_model_parallel_src_rank() == grid.group_of(me, "tp-pp")[0]
    assert mpu.get_tensor_model_parallel_src_rank() == tensor[0]
    assert mpu.get_data_parallel_src_rank() == data[0]
    _check_pipeline(pipeline, at["pp"])


def _check_pipeline(pipeline: list[int], index: int) -> None:
    first, last = index == 0, index == len(pipeline) - 1
    assert mpu.get_pipeline_model_parallel_first_rank() == pipeline[0]
    assert mpu.get_pipeline_model_parallel_last_rank() == pipeline[-1]
    assert mpu.get_pipeline_model_parallel_next_rank() == pipeline[(index + 1) % len(pipeline)]
    assert mpu.get_pipeline_model_parallel_prev_rank() == pipeline[index - 1]
    assert (mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()) == (first, last)
    assert mpu.is_rank_in_embedding_group() == (first or last)
    embedding = mpu.get_embedding_group()
    assert (embedding is not None) == (first or last)
    if embedding is not None:
        assert _ranks(embedding) == sorted({pipeline[0], pipeline[-1]})


def _check_chunks(index: int, pipeline_size: int) -> None:
    """With two chunks the first stage is chunk 0 of the first rank, and the last one chunk 1 of the last rank."""
    assert mpu.get_virtual_pipeline_model_parallel_world_size() == 2
    for chunk in (0, 1):
        mpu.set_virtual_pipeline_model_parallel_rank(chunk)
        assert mpu.get_virtual_pipeline_model_parallel_rank() == chunk
        expected = (index == 0 and chunk == 0, index == pipeline_size - 1 and chunk == 1)
        assert (
            mpu.is_pipeline_first_stage(ignore_virtual=False),
            mpu.is_pipeline_last_stage(ignore_virtual=False),
        ) == (expected)
        assert mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=1) is False
        assert mpu.is_rank_in_embedding_group(ignore_virtual=False) == any(expected)


def _check_world_of_eight() -> None:
    assert not mpu.model_parallel_is_initialized()
    with pytest.raises(LayoutError, match="initialize_model_parallel first"):
        mpu.get_tensor_model_parallel_group()
    with pytest.raises(RuntimeError, match="world size 8 cannot be divided"):
        mpu.initialize_model_parallel(3)
    assert mpu.get_tensor_model_parallel_group(check_initialized=False) is None
    with pytest.raises(RuntimeError, match="world size 8 cannot be divided by expert"):
        mpu.initialize_model_parallel(2, expert_model_parallel_size=3)
    with pytest.raises(RuntimeError, match="needs a pipeline"):
        mpu.initialize_model_parallel(2, virtual_pipeline_model_parallel_size=2)
    assert not mpu.model_parallel_is_initialized()
    for tensor, pipeline, context, expert, expert_tensor, order in (
        (2, 2, 1, 2, None, DEFAULT_ORDER),
        (2, 2, 2, 4, 1, DEFAULT_ORDER),
        (2, 4, 1, 1, None, "pp-dp-tp-cp-ep"),
    ):
        mpu.initialize_model_parallel(
            tensor,
            pipeline,
            2,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
            order=order,
        )
        assert mpu.model_parallel_is_initialized() and mpu.is_initialized()
        with pytest.raises(AssertionError, match="exist already"):
            mpu.initialize_model_parallel(tensor)
        grid = Grid.fit(8, tp=tensor, cp=context, pp=pipeline, ep=expert, etp=expert_tensor, order=order)
        _check_getters(grid)
        _check_chunks(grid.coordinates(dist.get_rank())["pp"], pipeline)
        mpu.destroy_model_parallel()
        assert not mpu.model_parallel_is_initialized()
        assert mpu.get_virtual_pipeline_model_parallel_world_size() is None


def test_getters_agree_with_the_grid() -> None:
    run_ranks(8, _check_world_of_eight)


def _context_levels() -> tuple[list[int], list[int]]:
    with pytest.raises(LayoutError, match="whose product is context_parallel_size=4"):
        mpu.initialize_model_parallel(context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 4])
    mpu.initialize_model_parallel(2, context_parallel_size=4, hierarchical_context_parallel_sizes=[2, 2])
    heads, ring = mpu.get_hierarchical_context_parallel_groups()
    return dist.get_process_group_ranks(heads), dist.get_process_group_ranks(ring)


def test_levels_of_context_parallelism() -> None:
    """tp 2, cp 4: heads are exchanged by neighbours, 2 ranks apart; rings connect every second one."""
    found = run_ranks(8, _context_levels)
    assert found[:2] == [([0, 2], [0, 4]), ([1, 3], [1, 5])]
    assert found[6:] == [([4, 6], [2, 6]), ([5, 7], [3, 7])]
    alone = mpu.get_hierarchical_context_parallel_groups()
    assert [group.size() for group in alone] == [1, 1]


def test_torch_distributed_must_be_there() -> None:
    with pytest.raises(AssertionError, match="init_process_group first"):
        mpu.initialize_model_parallel()


def test_process_that_stands_alone() -> None:
    """Without torch.distributed every axis has size 1."""
    assert isinstance(mpu.get_tensor_model_parallel_group(), LocalGroup)
    assert mpu.get_data_parallel_world_size() == mpu.get_pipeline_model_parallel_world_size() == 1
    assert mpu.is_pipeline_first_stage() and mpu.is_pipeline_last_stage()
    assert mpu.get_pipeline_model_parallel_next_rank() == 0
    assert not mpu.model_parallel_is_initialized()
