"""Compressed gradients: sums, stored errors, and bytes sent."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_core.data_parallel import DataParallel
from megatron_core.features.compression.powersgd import PowerSGD
from megatron_core.features.compression.signs import OneBitAdam, _start_compression
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.grid import Grid
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.verify import trace_training
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted
from tests.parity.rows import TP2
from tests.runs import tiny_config, tiny_run

ONEBIT = {"grad_compression": "onebit-adam", "clip_grad": 0.0}
POWER = {"grad_compression": "powersgd", "powersgd_rank": 2}
LAMB = {"grad_compression": "onebit-lamb", "optimizer": "lamb", "clip_grad": 0.0}


def _data(compressor: PowerSGD | OneBitAdam) -> DataParallel:
    """Two ranks' copies of a matrix and a vector."""
    model = nn.Sequential(nn.Linear(24, 48, dtype=torch.float64))
    return DataParallel({0: model}, ParallelGroups(Grid(dp=2), dist.get_rank()), compressor=compressor)


def _remembered(rank: int) -> list[tuple[float, float]]:
    """Repeated sums of the same gradients: distance of their running mean, and of a single sum, from the reference."""
    compressor = PowerSGD(rank, warmup=0)
    data = _data(compressor)
    torch.manual_seed(dist.get_rank())
    grads = [torch.randn_like(bucket.grads) for bucket in data.buckets]
    truths = []
    for grad in grads:
        truths.append(grad.clone())
        dist.all_reduce(truths[-1])
    means = [torch.zeros_like(grad) for grad in grads]
    rounds = 200
    for _ in range(rounds):
        for bucket, grad, mean in zip(data.buckets, grads, means, strict=True):
            bucket.grads.copy_(grad)
            bucket.start_reduce()
            bucket.finish_reduce()
            compressor.commit(1.0, 0.0)
            mean.add_(bucket.grads, alpha=1.0 / rounds)
    ends = sorted(zip(means, truths, data.buckets, strict=True), key=lambda end: not end[2].kind.decay)
    return [
        (
            ((mean - reference).norm() / reference.norm()).item(),
            ((bucket.grads - reference).norm() / reference.norm()).item(),
        )
        for mean, reference, bucket in ends
    ]


def test_powersgd_forgets_nothing() -> None:
    """A matrix of full rank does not fit into one column, but is transferred over several rounds; vectors are exact."""
    for matrix, vector in run_ranks(2, _remembered, 1):
        assert matrix[1] > 0.5
        assert matrix[0] < 0.15
        assert max(vector) < 1e-12


def test_a_lost_error_is_seen() -> None:
    with planted(
        "features.compression.powersgd:PowerSGD.reduce_", "bucket.grads.add_(errors, alpha=loss_scale)", "pass"
    ):
        assert all(matrix[0] > 0.5 for matrix, _ in run_ranks(2, _remembered, 1))


def _low_rank() -> float:
    """A sum of rank 2 is exact with 2 columns after convergence."""
    compressor = PowerSGD(2, warmup=0)
    data = _data(compressor)
    bucket = next(bucket for bucket in data.buckets if bucket.kind.decay)
    matrix = bucket.parameters[0]
    torch.manual_seed(5)
    left, right = torch.randn(48, 2, dtype=torch.float64), torch.randn(2, 24, dtype=torch.float64)
    for _ in range(2):
        bucket.grads.zero_()
        matrix.main_grad.copy_((1 + dist.get_rank()) * left @ right)
        bucket.start_reduce()
        bucket.finish_reduce()
        compressor.commit(1.0, 0.0)
    return (matrix.main_grad - 3.0 * left @ right).abs().max().item()


def test_powersgd_is_exact_where_the_rank_suffices() -> None:
    assert max(run_ranks(2, _low_rank)) < 1e-9


def _losses(settings: dict) -> tuple[list[float], int, list[float]]:
    run = tiny_run(train_iters=40, lr_decay_style="constant", lr=3e-3, **settings)
    results = []
    for step in range(40):
        before = sum(bucket.wire_bytes for bucket in run.data_parallel.buckets)
        results.append(train_step(run).loss)
        if step == 39:
            last = sum(bucket.wire_bytes for bucket in run.data_parallel.buckets) - before
    moments = [shard.state["exp_avg"].sum().item() for shard in run.optimizer.shards]
    return results, last, moments


def test_bytes_on_the_wire_and_losses() -> None:
    """In 40 steps every kind of compression learns like the plain sum, with a fraction of its bytes."""
    plain, whole, _ = run_ranks(2, _losses, {})[0]
    warmup = {"grad_compression_warmup_iters": 10}
    for settings, most in (
        ({"grad_reduce_in_bf16": True}, 0.5),
        ({"grad_reduce_in_bf16": True, "zero_stage": 3, "micro_batch_size": 4}, 0.55),
        (POWER | warmup, 0.3),
        (ONEBIT | warmup, 0.07),
    ):
        first, second = run_ranks(2, _losses, settings)
        assert first[0] == second[0], settings
        assert first[2] == second[2] or settings.get("zero_stage"), "momenta are equal to the bit"
        assert first[1] <= most * whole, settings
        assert plain[-1] < plain[0] - 0.3
        assert first[0][-1] < plain[-1] + 0.1 * (plain[0] - plain[-1]), settings


def _resume(settings: dict, root: Path) -> tuple[list[float], list[float]]:
    run = tiny_run(**settings, save=str(root))
    for _ in range(3):
        train_step(run)
    run.saver.save(run.state)
    expected = [train_step(run).loss for _ in range(2)]
    dist.barrier()
    resumed = tiny_run(**settings, load=str(root))
    return expected, [train_step(resumed).loss for _ in range(2)]


EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 32, "disable_bias_linear": True, "hidden_size": 32}
RESUMED = {
    "powersgd": POWER,
    "onebit": ONEBIT | {"lr": 1e-4},  # with larger rates after one step of warm-up the losses become NaN
    "powersgd zero2 overlap": POWER | {"zero_stage": 2, "overlap_grad_reduce": True},
    "onebit zero1 fp16 clip": ONEBIT | {"zero_stage": 1, "fp16": True, "clip_grad": 1.0},
    "tied weights on two stages": POWER | {"pipeline_model_parallel_size": 2},
    "experts on two ranks": POWER | EXPERTS | {"expert_model_parallel_size": 2},
    "halves of experts": POWER | EXPERTS | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("case", RESUMED)
def test_errors_are_part_of_a_checkpoint(case: str, tmp_path: Path) -> None:
    for expected, found in run_ranks(2, _resume, RESUMED[case] | {"grad_compression_warmup_iters": 1}, tmp_path):
        assert found == expected


def _compressing(**settings: object) -> Run:
    """A run with stored errors."""
    run = tiny_run(**settings, grad_compression_warmup_iters=1)
    train_step(run)
    train_step(run)
    assert any(error.any() for error in _errors(run))
    return run


def _other_layout(settings: dict, root: Path) -> tuple[bool, bool]:
    """Whether errors were restored from the checkpoint, and whether the next step was taken."""
    run = tiny_run(**settings, load=str(root))
    return any(bool(error.any()) for error in _errors(run)), not train_step(run).skipped


OTHER = {"tp2": TP2, "another rank": {"powersgd_rank": 1}, "other buckets": {"ddp_bucket_size": 3000}}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", OTHER)
def test_another_layout_goes_on_with_the_errors(case: str, tmp_path: Path) -> None:
    settings, size = POWER | {"grad_compression_warmup_iters": 1}, 4 if case == "tp2" else 2
    run_ranks(2, _resume, settings, tmp_path)
    assert run_ranks(size, _other_layout, settings | OTHER[case], tmp_path) == [(True, True)] * size


def _skip(settings: dict) -> tuple[bool, bool, bool]:
    run = _compressing(check_for_nan_in_loss_and_grad=False, **settings)
    bucket, before = run.data_parallel.buckets[0], [error.clone() for error in _errors(run)]
    start = bucket.start_reduce

    def spoiled() -> None:
        bucket.start_reduce = start
        if dist.get_rank() == 1:
            bucket.parameters[0].main_grad.view(-1)[0] = torch.inf
        start()

    bucket.start_reduce = spoiled
    skipped, left = train_step(run), [error.clone() for error in _errors(run)]
    after = train_step(run)
    same = all(torch.equal(old, new) for old, new in zip(before, left, strict=True))
    return skipped.skipped, after.skipped, same


def _errors(run: Run) -> list[torch.Tensor]:
    compressor = run.data_parallel.compressor
    assert compressor is not None
    return [t for b in run.data_parallel.buckets for kind, t, _ in compressor.state(b) if kind.endswith("error")]


METHODS = {
    "powersgd": POWER,
    "onebit": ONEBIT | {"lr": 1e-4},  # with larger rates after one step of warm-up the losses become NaN
    "powersgd zero2 overlap": POWER | {"zero_stage": 2, "overlap_grad_reduce": True},
    "onebit zero1 fp16": ONEBIT | {"zero_stage": 1, "fp16": True, "initial_loss_scale": 64.0},
    "onebit-lamb zero2 overlap": LAMB | {"zero_stage": 2, "overlap_grad_reduce": True},
}


@pytest.mark.parametrize("case", METHODS)
def test_an_overflow_is_skipped_and_errors_stay(case: str) -> None:  # C47
    """Also in other buckets, whose gradients are finite."""
    assert run_ranks(2, _skip, METHODS[case] | {"ddp_bucket_size": 3000}) == [(True, False, True)] * 2


def _spike(settings: dict) -> tuple[bool, bool]:
    run = _compressing(**settings)
    before = [error.clone() for error in _errors(run)]
    skipped = train_step(run, hooks=StepHooks(is_bad=lambda loss, norm: True)).skipped
    return skipped, all(torch.equal(old, new) for old, new in zip(before, _errors(run), strict=True))


@pytest.mark.parametrize("settings", [POWER, ONEBIT], ids=["powersgd", "onebit"])
def test_a_spike_that_is_skipped_does_not_come_back(settings: dict) -> None:
    assert run_ranks(2, _spike, settings) == [(True, True)] * 2


ONE_GROUP = {"group_query_attention": True, "num_query_groups": 1}


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "settings",
    [ONEBIT, ONEBIT | ONE_GROUP, POWER | ONE_GROUP, LAMB | ONE_GROUP],
    ids=["1bit", "1bit kv", "power kv", "lamb kv"],
)
def test_copies_on_tensor_parallel_ranks_stay_equal(settings: dict) -> None:  # C11, C19
    """Norms and biases, and keys and values with fewer heads than ranks."""
    settings = settings | {"fp64": True, "tensor_model_parallel_size": 2, "grad_compression_warmup_iters": 1}
    assert trace_training(tiny_config(**settings), 4).faults == []


def _scales() -> tuple[float, float]:
    """The scale of this rank's part of a message, and the root mean square of the whole message."""
    group = ParallelGroups(Grid(tp=2), dist.get_rank()).group("tp")
    whole = torch.randn(2, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    _, mean, handle = _start_compression(whole[group.rank()], group)
    handle.wait()
    return mean.sqrt().item(), whole.square().mean().sqrt().item()


def test_parts_of_a_message_have_the_scale_of_the_whole() -> None:
    for scale, expected in run_ranks(2, _scales):
        assert scale == pytest.approx(expected, rel=1e-12)
