"""Flat buckets: what lies where, and when the reduction of each begins."""

from __future__ import annotations

import torch
from torch import nn

from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.data_parallel.buffer import make_buckets
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.groups import LocalGroup
from megatron_core.training.step import count_tokens, load_batches, run_training_plan
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run


class _Half(LocalGroup):
    """The place of one of two ranks, without communication: enough to lay out shards."""

    def __init__(self, index: int) -> None:
        self.index = index

    def size(self) -> int:
        return 2

    def rank(self) -> int:
        return self.index


def _chain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2, bias=False))


def _buckets(module: nn.Module, index: int = 0, bucket_size: int = 1000) -> list[Bucket]:
    named = module.named_parameters()
    return make_buckets(named, 0, _Half(index), tp_size=1, bucket_size=bucket_size, sharded=True)


def test_parameters_and_gradients_are_views() -> None:
    module = _chain()
    before = [p.detach().clone() for p in module.parameters()]
    matrices, bias = _buckets(module)
    assert matrices.names == ["1.weight", "0.weight"]  # last first, as backward finishes them
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
    """How many buckets are under way when backward has ended."""
    run = tiny_run(overlap_grad_reduce=overlap, ddp_bucket_size=2000)
    batches = load_batches(run, run.step_after(0))
    run.data_parallel.zero_grad()
    run_training_plan(run, batches, 1.0 / count_tokens(run, batches))
    started = sum(bucket.reduced for bucket in run.data_parallel.buckets)
    run.data_parallel.finish()
    return started, len(run.data_parallel.buckets)


def test_overlap_reduces_during_backward() -> None:
    started, total = run_ranks(2, _reduced_before_finish, True)[0]
    assert started == total > 4
    assert run_ranks(2, _reduced_before_finish, False)[0][0] == 0
