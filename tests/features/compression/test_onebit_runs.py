"""Whole trainings with 1-bit LAMB and 0/1 Adam: checkpoints, overflows, equal replicas, and memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_core.config.parallel import compression_of
from megatron_core.features.compression.signs import OneBitLAMB, SignSums
from megatron_core.features.compression.updates import ZeroOneAdamUpdate
from megatron_core.reports.replicas import Replicas
from megatron_core.training.driver import StepHooks
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.defects.plant import planted
from tests.parity.rows import TP2
from tests.runs import tiny_run

LAMB = {"optimizer": "lamb", "grad_compression": "onebit-lamb", "grad_compression_warmup_iters": 2}
ZERO_ONE = {
    "grad_compression": "zero-one-adam",
    "adam_beta2": 0.9,
    "zero_one_var_freeze_step": 2,
    "zero_one_var_update_scaler": 1,
}
LOCAL = ZERO_ONE | {"zero_one_local_step_scaler": 1, "zero_one_local_step_clipper": 4}
"""Steps 3, 4, 8 and 12 synchronize."""
PP2 = {"pipeline_model_parallel_size": 2}
FP16 = {"fp16": True, "initial_loss_scale": 64.0}


def _weights(run: Run) -> list[torch.Tensor]:
    return [tensor.clone() for shard in run.optimizer.shards for tensor in (shard.main, *shard.state.values())]


def _resume(settings: dict, root: Path) -> bool:
    """Whether three steps after a checkpoint within local steps are those of the run that saved it."""
    run = tiny_run(**settings, save=str(root))
    for _ in range(5):
        train_step(run)
    run.saver.save(run.state)
    for _ in range(3):
        train_step(run)
    dist.barrier()
    resumed = tiny_run(**settings, load=str(root))
    for _ in range(3):
        train_step(resumed)
    pairs = zip(_weights(run), _weights(resumed), strict=True)
    return all(torch.equal(one, other) for one, other in pairs) and resumed.state.iteration == 8


RESUMED = {
    "lamb zero2 fp16 overlap": (2, LAMB | FP16 | {"zero_stage": 2, "clip_grad": 1.0, "overlap_grad_reduce": True}),
    "lamb, tied weights on two stages": (4, LAMB | PP2),
    "zero-one bf16": (2, LOCAL | {"bf16": True}),
    "zero-one tp2": (4, LOCAL | TP2 | {"clip_grad": 0.1}),
}


@pytest.mark.drawn(2)
@pytest.mark.parametrize("case", RESUMED)
def test_a_resumed_run_continues_to_the_bit(case: str, tmp_path: Path) -> None:
    ranks, settings = RESUMED[case]
    assert run_ranks(ranks, _resume, settings, tmp_path) == [True] * ranks


def _save(settings: dict, root: Path) -> float:
    run = tiny_run(**settings, save=str(root))
    for _ in range(4):
        train_step(run)
    run.saver.save(run.state)
    return _coefficients(run)


def _load(settings: dict, root: Path) -> tuple[float, bool]:
    run = tiny_run(**settings, load=str(root))
    return _coefficients(run), train_step(run).skipped


def _coefficients(run: Run) -> float:
    compressor, data = run.data_parallel.compressor, run.data_parallel
    assert isinstance(compressor, OneBitLAMB)
    found = [compressor.coefficients(bucket) for bucket in data.buckets]
    assert all((each[:, 0] > 0).any() and (each[:, 2] != 1.0).any() for each in found)
    return sum(each.sum().item() for each in found)


def test_another_layout_has_the_coefficients_of_lamb(tmp_path: Path) -> None:
    (expected, _) = run_ranks(2, _save, LAMB, tmp_path)
    for found, skipped in run_ranks(4, _load, LAMB | TP2 | {"zero_stage": 1}, tmp_path):
        assert found == pytest.approx(expected, rel=1e-12) and not skipped


def _local_steps(settings: dict) -> tuple[list[bool], list[bool], list[str], float, float]:
    """Five steps, the fifth with an infinite gradient on the last rank, and two more.

    Skipped steps, steps after which ranks differ, differences after a synchronization, the norm of the last step, and
    the squared norm of this rank's gradient in it.
    """
    run = tiny_run(check_for_nan_in_loss_and_grad=False, **settings)
    skipped, differs = [], []
    buckets, own = run.data_parallel.buckets, 0.0

    def measure() -> None:
        nonlocal own
        own = sum(bucket.grads.double().square().sum().item() for bucket in buckets)

    for step in range(1, 8):
        start = buckets[0].start_reduce
        if step == 5 and run.groups.rank == run.world.size - 1:

            def spoiled(start=start) -> None:
                buckets[0].parameters[0].main_grad.view(-1)[0] = torch.inf
                start()

            buckets[0].start_reduce = spoiled
        result = train_step(run, hooks=StepHooks(before_update=measure))
        buckets[0].start_reduce = start
        skipped.append(result.skipped)
        differs.append(run.optimizer.has_local_changes)
    named = [pair for stage in run.stages.values() for pair in stage.named_global_parameters()]
    replicas = Replicas(named, run.groups, run.world.device)
    assert replicas.differences(replicas.hashes()), "local steps differ"
    run.optimizer.synchronize()
    return skipped, differs, replicas.differences(replicas.hashes()), result.grad_norm, own


def test_local_steps_skip_together_and_end_equal() -> None:
    """The skipped step does not count: steps 5 and 6 are local, without a synchronization."""
    results = run_ranks(2, _local_steps, LOCAL | {"bf16": True, "clip_grad": 0.0})
    for skipped, differs, differences, norm, _ in results:
        assert skipped == [False] * 4 + [True] + [False] * 2
        assert differs == [False] * 4 + [False, True, True]
        assert differences == []
        assert norm == pytest.approx((sum(own for *_, own in results) / 2) ** 0.5, rel=1e-6)


def test_replicas_that_keep_their_own_change_are_found() -> None:
    with planted(
        "features.compression.updates:ZeroOneAdamUpdate.synchronize",
        "local.origin, summed",
        "local.origin + local.change, summed",
    ):
        results = run_ranks(2, _local_steps, LOCAL | {"clip_grad": 0.0})
    assert all("differs from rank" in each for _, _, differences, _, _ in results for each in differences)
    assert results[0][2] != []


def _held(settings: dict) -> tuple[float, float]:
    """Bytes per parameter of the compressor and of local changes before an update; by formula without gradients."""
    found = []
    run = tiny_run(**settings, vocab_size=64)
    compressor, parallel = run.data_parallel.compressor, run.config.parallel
    assert isinstance(compressor, SignSums)

    def measure() -> None:
        kept = [vars(compressor).get(name, {}) for name in ("_errors", "_pending", "_gathered")]
        tensors = [tensor for each in kept for pair in each.values() for tensor in pair]
        tensors += [*vars(compressor).get("_sums", {}).values()]
        algorithm = run.optimizer.shards[0].algorithm
        local = algorithm.pending.values() if isinstance(algorithm, ZeroOneAdamUpdate) else ()
        tensors += [tensor for each in local for tensor in (each.origin, each.change)]
        found.append(sum(tensor.nbytes for tensor in tensors))

    for _ in range(6):
        train_step(run, hooks=StepHooks(before_update=measure))
    total = sum(bucket.weights.numel() for bucket in run.data_parallel.buckets)
    whole = 4 if parallel.dp_zero_stage >= 2 else 0
    kind = compression_of(parallel)
    assert kind is not None
    planned = kind.bytes_per_parameter(4, 2, parallel.dp_zero_stage)
    return max(found) / total, planned - whole


@pytest.mark.parametrize("settings", [LAMB, LAMB | {"zero_stage": 2}, LOCAL], ids=["lamb", "lamb zero2", "zero-one"])
def test_memory_of_compression_is_planned(settings: dict) -> None:
    for found, planned in run_ranks(2, _held, settings):
        assert found == pytest.approx(planned, rel=1e-6)
