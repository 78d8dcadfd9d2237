"""A non-finite gradient on one rank: all ranks skip the step together, count it, and continue."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist

from megatron_core.parallel.sharding import spec_of
from megatron_core.training.setup import Run
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run
from tests.sample import WHOLE_MATRIX

TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, dict] = {
    "tp2": TP2,
    "tp2 sp": TP2 | {"sequence_parallel": True},
    "pp2": PP2,
    "dp2": {},
    "dp2 zero1": {"use_distributed_optimizer": True, "overlap_param_gather": True},
    "dp2 zero2": {"zero_stage": 2},
    "dp2 zero3": {"zero_stage": 3, "overlap_grad_reduce": True, "overlap_param_gather": True},
}
PRECISIONS = {
    "fp16": {"fp16": True, "initial_loss_scale": 2.0**10, "hysteresis": 1},
    "fp32": {"check_for_nan_in_loss_and_grad": False},
}


def _digest(run: Run) -> str:
    parameters = [p for stage in run.stages.values() for p in stage.parameters()]
    whole = run.data_parallel.reading(parameters)
    content = [p.detach().to(torch.float64, copy=True).numpy().tobytes() for p in whole]
    return hashlib.sha256(b"".join(content)).hexdigest()


def _spoil(run: Run, value: float, split: bool) -> None:
    """Write ``value`` to one gradient element of a parameter that is split or replicated over tensor-parallel ranks."""
    parameters = [p for stage in run.stages.values() for p in stage.parameters()]
    chosen = [p for p in parameters if bool(spec_of(p).splits) == split]
    (bucket,) = (b for b in run.data_parallel.buckets if any(p is chosen[-1] for p in b.parameters))
    start = bucket.start_reduce

    def spoiled() -> None:
        chosen[-1].main_grad.view(-1)[0] = value
        bucket.start_reduce = start
        start()

    bucket.start_reduce = spoiled


def _skip_one(settings: dict, rank: int, value: float, split: bool) -> tuple:
    run = tiny_run(**settings)
    scale = run.optimizer.loss_scale.scale
    train_step(run)
    before = _digest(run)
    if dist.get_rank() == rank:
        _spoil(run, value, split)
    skipped = train_step(run)
    unchanged = _digest(run) == before
    following = train_step(run)
    return (
        (skipped.skipped, unchanged, run.state.skipped_iterations, run.optimizer.steps_taken),
        run.optimizer.loss_scale.scale / scale,
        (following.skipped, _digest(run) != before),
        (skipped.loss, skipped.learning_rate, following.loss, following.grad_norm, following.learning_rate),
    )


CASES = [("fp16", 0, torch.inf), ("fp16", 1, torch.inf), ("fp32", 1, torch.nan)]
# A layout's cases alternate between a split and a replicated parameter: every pair of values occurs.
ALL = [(n + m, layout, *case) for n, layout in enumerate(LAYOUTS) for m, case in enumerate(CASES)]


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("layout", "precision", "rank", "value", "split"),
    [(*case, split) for n, *case in ALL for split in (True, False) if WHOLE_MATRIX or split == (n % 2 == 0)],
)
def test_one_rank_overflows_and_all_skip(  # C47 C64
    layout: str, precision: str, rank: int, value: float, split: bool
) -> None:
    results = run_ranks(2, _skip_one, LAYOUTS[layout] | PRECISIONS[precision], rank, value, split)
    for counts, scaled, after, numbers in results:
        assert counts == (True, True, 1, 2), "skipped, nothing moved, one skip counted, two steps taken"
        assert scaled == (0.5 if precision == "fp16" else 1.0)
        assert after == (False, True), "the next step is taken again"
        assert numbers == results[0][3], "ranks agree on what they report"
