"""Poisoned buffers: correct runs are not affected, and a read before the data arrives gives NaN.

Everything runs in forked ranks, because the mode applies to a whole process.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from megatron_core.data_parallel import Bucket, buffer
from megatron_core.errors import MegatronError
from megatron_core.parallel import collectives, poison
from megatron_core.parallel.handles import Done
from megatron_core.training.loop import train
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

OVERLAP = {"use_distributed_optimizer": True, "overlap_param_gather": True, "overlap_grad_reduce": True}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}


def _steps(settings: dict) -> list[tuple[float, float]]:
    run = tiny_run(ddp_bucket_size=2000, **settings)
    assert poison.is_on() == run.config.monitor.poison_buffers
    return [(result.loss, result.grad_norm) for result in (train_step(run) for _ in range(3))]


def _both(settings: dict) -> list[list[tuple[float, float]]]:
    return [_steps(settings | {"poison_buffers": on}) for on in (False, True)]


@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, {"hidden_dropout": 0.1}),
        (2, OVERLAP),
        (2, OVERLAP | {"bf16": True}),
        (4, TP2 | OVERLAP),
        (2, PP2),
        (2, OVERLAP | {"zero_stage": 3}),
    ],
    ids=["one", "zero1", "zero1-bf16", "tp2-zero1", "pp2", "zero3"],
)
def test_a_sound_run_is_the_same_to_the_bit(world: int, settings: dict) -> None:  # C60
    for plain, poisoned in run_ranks(world, _both, settings):
        assert poisoned == plain


def _outdated() -> tuple[bool, bool, bool]:
    run = tiny_run(poison_buffers=True, **OVERLAP)
    bucket = run.data_parallel.buckets[0]
    own = bucket.shard
    outside = slice(own.stop, None) if own.start == 0 else slice(0, own.start)
    train_step(run)
    grads = bool(bucket.grads[outside].isnan().all())
    run.data_parallel.finish_param_sync()
    buffer.all_gather_flat_ = lambda *args, **kwargs: Done()
    bucket.start_gather()
    return grads, bool(bucket.weights[outside].isnan().all()), bool(bucket.weights[own].isfinite().all())


def test_outdated_parts_are_nan_and_the_own_part_stays() -> None:
    assert run_ranks(2, _outdated) == [(True, True, True)] * 2


def _never_gather() -> None:
    buffer.all_gather_flat_ = lambda *args, **kwargs: Done()


def _never_finish_gather() -> None:
    """A gather that starts in ``wait``, which is never called."""
    _never_gather()
    Bucket.finish_gather = lambda bucket: None


def _never_reduce_scatter() -> None:
    collectives._reduce_scatter = lambda *args, **kwargs: Done()


def _outcomes(spoil: Callable[[], None], settings: dict) -> list[str]:
    """The results of a run with a planted defect, without and with poison."""
    spoil()
    outcomes = []
    for on in (False, True):
        run = tiny_run(eval_iters=0, train_iters=3, replica_check_interval=None, poison_buffers=on, **settings)
        try:
            train(run, [])
            outcomes.append("trained")
        except MegatronError as error:
            outcomes.append(str(error))
    return outcomes


@pytest.mark.parametrize("spoil", [_never_gather, _never_finish_gather])
def test_outdated_weights_end_the_run(spoil: Callable[[], None]) -> None:  # C59 C60
    """Not detected without poison; with it all ranks stop together."""
    (plain, first), second = run_ranks(2, _outcomes, spoil, OVERLAP)
    assert plain == "trained"
    assert "loss is nan" in first
    assert second == [plain, first]


def test_memory_that_nobody_filled_ends_the_run() -> None:  # C60
    (_, first), (_, second) = run_ranks(2, _outcomes, _never_reduce_scatter, TP2)
    assert "loss is nan" in first
    assert second == first
