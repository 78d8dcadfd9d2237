"""Flat buckets: layout of parameters, and the start of each reduction."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from megatron_core.data_parallel import Bucket, BucketMemory, DataParallel, DataParallelSettings
from megatron_core.data_parallel.bucket_layout import matrix_work
from megatron_core.data_parallel.compressor import Compressor
from megatron_core.data_parallel.fill import make_buckets, units_of
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.handles import Handle
from megatron_core.parallel.sharding import replicated
from megatron_core.training.driver import StepWork, forward_backward
from megatron_core.training.objective import count_tokens
from megatron_core.training.step import forward_step, load_batches
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run


def _chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))


def _buckets(module: nn.Module, index: int = 0, bucket_size: int = 1000, zero_stage: int = 1) -> list[Bucket]:
    groups = ParallelGroups(Grid(dp=2), index)  # two copies, without communication: enough to lay out shards
    settings = DataParallelSettings(bucket_size=bucket_size, zero_stage=zero_stage)
    return make_buckets(units_of(module, groups), 0, groups, settings, BucketMemory())


def test_parameters_and_gradients_are_views() -> None:
    module = _chain()
    before = [p.detach().clone() for p in module.parameters()]
    matrices, bias = _buckets(module)
    assert matrices.names == ["1.weight", "0.weight"]  # last first, in the order of backward
    assert bias.names == ["0.bias"]
    assert all(torch.equal(p, old) for p, old in zip(module.parameters(), before, strict=True))
    matrices.weights.fill_(7.0)
    matrices.grads.fill_(9.0)
    assert (module[0].weight == 7.0).all()
    assert (module[1].weight.main_grad == 9.0).all()


def test_shards_are_equal_and_cover_everything() -> None:
    module = _chain()
    shards = [_buckets(module, index) for index in range(2)]
    for left, right in zip(*shards, strict=True):
        assert left.weight_shard.numel() == right.weight_shard.numel()
        assert left.shard.stop == right.shard.start
        assert left.shard.stop % 8 == 0  # 16 bytes of the narrowest type
        covered = [(name, i) for b in (left, right) for name, _, a, z, _ in b.pieces() for i in range(a, z)]
        assert len(covered) == len(set(covered)) == sum(p.numel() for p in left.parameters)


def test_decay_is_for_matrices_alone() -> None:
    kinds = {name: b.kind.decay for b in _buckets(_chain()) for name in b.names}
    assert kinds == {"0.weight": True, "1.weight": True, "0.bias": False}


def test_bucket_size_closes_buckets() -> None:
    assert [b.names for b in _buckets(_chain(), bucket_size=10) if b.kind.decay] == [["1.weight"], ["0.weight"]]


@pytest.mark.parametrize("shape", [(5,), (4, 4), (3, 7), (7, 3), (2, 3, 3, 5)])
def test_matrix_work_counts_multiplications(shape: tuple[int, ...]) -> None:
    """Muon's iteration X <- a X + (b A + c A A) X with A = X X^T, on the shorter side, as torch counts its products."""
    if len(shape) == 1:
        assert matrix_work(shape) == 5
        return
    x = torch.zeros(shape)
    x = x.mT if shape[-2] > shape[-1] else x
    with FlopCounterMode(display=False) as counter:
        gram = x @ x.mT
        (gram + gram @ gram) @ x
    assert 2 * matrix_work(shape) == counter.get_total_flops()


def test_buckets_join_units_below_stage_2_alone() -> None:
    """A unit is a child here; GPT's are the embedding, each layer and the head."""
    joined = [b.names for b in _buckets(_chain(), zero_stage=1)]
    assert joined == [["1.weight", "0.weight"], ["0.bias"]]
    assert [b.names for b in _buckets(_chain(), zero_stage=2)] == [["1.weight"], ["0.bias"], ["0.weight"]]


def test_units_of_a_model() -> None:
    (stage,) = tiny_run(untie_embeddings_and_output_weights=True).stages.values()
    named = dict(stage.named_global_parameters())
    units = units_of(stage, ParallelGroups.single())
    assert [name for unit in units for name, _ in unit] == list(named)
    heads = [{name.split(".")[0 if not name.startswith("decoder.layers") else 2] for name, _ in unit} for unit in units]
    assert heads == [{"embedding"}, {"0"}, {"1"}, {"decoder", "output_layer"}]


def test_sixteen_bit_weights_have_float32_gradients() -> None:
    assert {b.grads.dtype for b in _buckets(_chain().to(torch.bfloat16))} == {torch.float32}


def test_frozen_parameters_take_no_part() -> None:
    module = _chain()
    module[0].weight.requires_grad_(False)
    data = DataParallel({0: module}, ParallelGroups.single())
    assert [name for name, _ in data.frozen] == ["0.weight"]
    module(torch.ones(1, 3)).sum().backward()
    assert not hasattr(module[0].weight, "main_grad")
    assert module[1].weight.main_grad.abs().sum() > 0


def _reduced_before_finish(overlap: bool) -> tuple[int, int]:
    """Number of pending buckets at the end of backward."""
    run = tiny_run(overlap_grad_reduce=overlap, ddp_bucket_size=2000)
    batches = load_batches(run, run.step_after(0))
    run.data_parallel.zero_grad()
    plan = run.plans.training(len(batches))
    forward_backward(run, StepWork(plan, forward_step(run, batches), count_tokens(batches)))
    started = sum(bucket.reduced for bucket in run.data_parallel.buckets)
    run.data_parallel.finish_grad_sync()
    return started, len(run.data_parallel.buckets)


def test_overlap_reduces_during_backward() -> None:
    started, total = run_ranks(2, _reduced_before_finish, True)[0]
    assert started == total > 4
    assert run_ranks(2, _reduced_before_finish, False)[0][0] == 0


class Recording(Compressor):
    """Sums without loss, and keeps the gradients that it gets."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[float] = []

    def is_active(self) -> bool:
        return True

    def reduce_(self, bucket: Bucket) -> Iterator[Handle]:
        self.received.append(bucket.grads[0].item())
        yield all_reduce_(bucket.grads, bucket.dp_group, async_op=True)


def _compressed(zero_stage: int) -> tuple[list[float], float]:
    """Gradients of a weight of which each tensor-parallel rank computes a part: those compressed, and the sum."""
    rank = dist.get_rank()
    groups = ParallelGroups(Grid(tp=2, dp=2), rank)
    layer = nn.Linear(4, 4, bias=False)
    layer.weight.shard_spec = replicated((4, 4), groups.index("tp"), partial_grad=True)
    compressor = Recording()
    data = DataParallel({0: layer}, groups, DataParallelSettings(zero_stage=zero_stage), compressor=compressor)
    layer(torch.full((1, 4), 10.0**rank)).sum().backward()
    data.finish_grad_sync()
    return compressor.received, data.buckets[0].grad_shard[0].item()


@pytest.mark.parametrize("zero_stage", [0, 2])
def test_compressors_get_gradients_that_are_complete_over_model_axes(zero_stage: int) -> None:
    """Else each rank's part would be approximated instead of the gradient."""
    results = run_ranks(4, _compressed, zero_stage)
    assert [received for received, _ in results] == [[11.0], [11.0], [1100.0], [1100.0]]
    assert [total for _, total in results] == [1111.0] * 4
