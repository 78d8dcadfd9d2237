"""Overlap on and off give bitwise equal results for any contents of the buffers between steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megatron_core.data_parallel import Bucket, DataParallel, DataParallelSettings, buffer
from megatron_core.parallel.collectives import all_gather_flat_
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

SMALL = {"hidden_size": 16, "seq_length": 8, "micro_batch_size": 1, "global_batch_size": 4, "ddp_bucket_size": 500}
OVERLAP = {"overlap_grad_reduce": True}
SHARDED = {"use_distributed_optimizer": True}
GATHER = SHARDED | OVERLAP | {"overlap_param_gather": True}


def _poison(bucket: Bucket) -> None:
    """Buffers that must not be read again: all gradients, and weights updated by other ranks."""
    bucket.grads.fill_(torch.nan)
    foreign = torch.ones_like(bucket.weights, dtype=torch.bool)
    foreign[bucket.shard] = False
    bucket.weights[foreign] = torch.nan


def _train(settings: dict, poisoned: bool) -> tuple[list[tuple[float, float]], list[np.ndarray]]:
    run = tiny_run(**SMALL | settings)
    gather = run.data_parallel.start_param_sync

    def poison_and_gather() -> None:
        for bucket in run.data_parallel.buckets:
            _poison(bucket)
        gather()

    if poisoned:
        run.data_parallel.start_param_sync = poison_and_gather
    results = [train_step(run) for _ in range(3)]
    run.data_parallel.finish_param_sync()
    return [(r.loss, r.grad_norm) for r in results], _weights(run)


def _weights(run: Run) -> list[np.ndarray]:
    return [p.detach().numpy().copy() for stage in run.stages.values() for p in stage.parameters()]


@pytest.mark.parametrize(
    ("settings", "others"), [({}, [{}, OVERLAP]), (SHARDED, [SHARDED, GATHER])], ids=["whole", "sharded"]
)
def test_overlap_changes_no_bit(settings: dict, others: list[dict]) -> None:  # C12 C36 C37 C59 C60
    """The embedding is tied: the output layer and the lookup both add to its gradient."""
    plain = run_ranks(2, _train, settings, False)
    for other in others:
        for (numbers, weights), (expected, whole) in zip(run_ranks(2, _train, other, True), plain, strict=True):
            assert numbers == expected, other
            for found, baseline in zip(weights, whole, strict=True):
                np.testing.assert_array_equal(found, baseline, err_msg=str(other))


class Backwards(nn.Module):
    """Runs its layers in reverse order of registration, the first one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, dtype=torch.float64) for _ in range(3))
        for number, parameter in enumerate(self.parameters()):
            draw = torch.Generator().manual_seed(number)
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw))

    def forward(self, x: Tensor) -> Tensor:
        for i in (2, 1, 0, 0):
            x = torch.tanh(self.layers[i](x))
        return x


def _descend(overlap: bool) -> list[np.ndarray]:
    """Three steps of gradient descent, in which each rank updates its shard."""
    model = Backwards()
    groups = ParallelGroups(Grid(dp=2), torch.distributed.get_rank())
    settings = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    data = DataParallel({0: model}, groups, DataParallelSettings(zero_stage=1, bucket_size=1, **settings))
    for step in range(3):
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(10 * step + groups.rank))
        data.zero_grad()
        data.enable_grad_sync(0)
        model(x).square().sum().backward()
        data.finish_grad_sync()
        for bucket in data.buckets:
            bucket.weight_shard.sub_(0.1 * bucket.grad_shard)
        data.start_param_sync()
    data.finish_param_sync()
    return [p.detach().numpy().copy() for p in model.parameters()]


def test_order_of_execution_is_not_that_of_registration() -> None:  # C59
    plain, overlapped = run_ranks(2, _descend, False), run_ranks(2, _descend, True)
    start = [p.detach().numpy() for p in Backwards().parameters()]
    for ranks in zip(*plain, *overlapped, strict=True):
        for weights in ranks[1:]:
            np.testing.assert_array_equal(weights, ranks[0])
    assert all(not np.array_equal(a, b) for a, b in zip(plain[0], start, strict=True))


class _Later:
    """A gather whose weights arrive when it is waited for."""

    def __init__(self, *args: Any) -> None:
        self._args = args

    def wait(self) -> None:
        all_gather_flat_(*self._args)


def _read_without_a_forward() -> list[bool]:
    """Whether each weight has its updated value when it is read outside of its module."""
    buffer.all_gather_flat_ = lambda weights, shard, group, async_op: _Later(weights, shard, group)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    groups = ParallelGroups(Grid(dp=2), torch.distributed.get_rank())
    settings = DataParallelSettings(zero_stage=1, overlap_param_gather=True)
    data = DataParallel({0: model}, groups, settings)
    for bucket in data.buckets:
        bucket.weight_shard.fill_(7.0)
    data.start_param_sync()
    return [bool((parameter * 2 == 14.0).all()) for parameter in model.parameters()]


def test_reads_outside_of_a_module_wait_for_the_weights() -> None:
    assert run_ranks(2, _read_without_a_forward) == [[True] * 4] * 2
