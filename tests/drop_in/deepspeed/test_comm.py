"""``deepspeed.comm``, groups, and recomputation."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import deepspeed
from deepspeed import comm
from deepspeed.runtime.comm.coalesced_collectives import reduce_scatter_coalesced
from deepspeed.runtime.pipe.topology import PipeDataParallelTopology, PipelineParallelGrid
from deepspeed.utils import groups
from megatron_core.errors import LayoutError
from megatron_core.verify.ranks import run_ranks


def _collectives() -> dict[str, object]:
    rank = comm.get_rank()
    one = torch.full((2,), float(rank + 1))
    summed, parts = one.clone(), [torch.zeros(4)]
    comm.inference_all_reduce(summed)
    comm.all_gather_coalesced(parts, [one])
    each = [one.clone(), one.clone() * 2]
    comm.all_reduce_coalesced(each)
    half = torch.zeros(1)
    comm.reduce_scatter_fn(half, one)
    listed: list[object] = [None, None]
    comm.all_gather_object(listed, rank)
    scalars = torch.zeros(2)
    comm.all_gather_into_tensor(scalars, torch.tensor(float(rank)))
    comm.barrier()
    return {
        "summed": summed.tolist(),
        "gathered": parts[0].tolist(),
        "each": [tensor.tolist() for tensor in each],
        "half": half.tolist(),
        "listed": listed,
        "scalars": scalars.tolist(),
        "ranks": (comm.get_world_size(), comm.get_all_ranks_from_group(), groups._get_data_parallel_world_size()),
    }


def test_collectives_on_two_ranks() -> None:
    for rank, found in enumerate(run_ranks(2, _collectives)):
        assert found["summed"] == [3.0, 3.0] and found["gathered"] == [1.0, 1.0, 2.0, 2.0]
        assert found["each"] == [[3.0, 3.0], [6.0, 6.0]] and found["half"] == [3.0]
        assert found["listed"] == [0, 1] and found["scalars"] == [0.0, 1.0]
        assert found["ranks"] == (2, [0, 1], 2), rank


def _parts() -> dict[str, object]:
    rank = comm.get_rank()
    inputs = [torch.arange(3.0) * rank, torch.ones(1, dtype=torch.float64), torch.full((2, 2), float(rank))]
    grids = {"pipe": PipelineParallelGrid(), "data": PipelineParallelGrid(PipeDataParallelTopology(1, 2))}
    totals = {}
    for name, grid in grids.items():
        sums = [torch.tensor([rank + 1.0]) for _ in range(3)]
        groups_of = (grid.get_pipe_parallel_group, grid.get_data_parallel_group, grid.get_model_parallel_group)
        for total, group in zip(sums, groups_of, strict=True):
            dist.all_reduce(total, group=group())
        totals[name] = [total.item() for total in sums]
    return {
        "means": [each.tolist() for each in reduce_scatter_coalesced(inputs)],
        "totals": totals,
    }


def test_parts_of_tensors_and_groups_of_a_topology() -> None:
    for rank, found in enumerate(run_ranks(2, _parts)):
        assert found["means"] == ([[0.0, 0.5], [1.0], [0.5, 0.5]] if rank == 0 else [[1.0], [], [0.5, 0.5]])
        own = rank + 1.0
        assert found["totals"] == {"pipe": [3.0, own, own], "data": [own, 3.0, own]}


def test_one_process_is_initialized_without_a_launcher() -> None:
    with pytest.raises(LayoutError, match="dist_init_required=False"):
        deepspeed.init_distributed(dist_init_required=False)
    deepspeed.init_distributed()
    assert (comm.is_initialized(), dist.get_world_size(), comm.get_local_rank()) == (True, 1, 0)
    deepspeed.init_distributed()


def test_recomputed_gradients_are_equal() -> None:
    torch.manual_seed(0)
    layer, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Tanh()), torch.randn(3, 4)
    calls: list[int] = []
    layer[0].register_forward_hook(lambda *_: calls.append(1))
    found = []
    for run in (layer, lambda given: deepspeed.checkpointing.checkpoint(layer, given)):
        torch.manual_seed(1)
        layer.zero_grad()
        run(x.clone().requires_grad_()).sum().backward()
        found.append(layer[0].weight.grad.clone())
    assert torch.equal(*found)
    assert len(calls) == 3
