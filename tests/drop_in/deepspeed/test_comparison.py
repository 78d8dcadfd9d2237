"""Comparison of training with the drop-in and with DeepSpeed: losses, norms, rates, counters, weights of 20 steps."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.drop_in.deepspeed.compare import REFERENCE, Job, Result, results

RELATIVE = 2e-5
"""Float32 rounding: the sums of gradients are in another order; 20 steps of AdamW amplify it."""
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}}


def _config(stage: int, **others: Any) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}
    return {**sizes, "zero_optimization": {"stage": stage}, "optimizer": ADAMW, **others}


def _without_optimizer(stage: int) -> dict[str, Any]:
    config = _config(stage, zero_allow_untested_optimizer=True, zero_force_ds_cpu_optimizer=False)
    return {name: value for name, value in config.items() if name != "optimizer"}


JOBS = [
    Job("zero0", _config(0, gradient_clipping=0.5, scheduler=WARMUP), ranks=2),
    Job("zero1", _config(1, gradient_clipping=0.5), ranks=2),
    Job("zero2", _config(2, scheduler=WARMUP, gradient_clipping=0.0), ranks=2),
    Job("zero3", _config(3, gradient_clipping=0.5, scheduler=WARMUP), ranks=2),
    Job("alone", _config(2, gradient_clipping=0.5, scheduler=WARMUP)),
    Job("client", _without_optimizer(1), ranks=2, program="client"),
]


QUICK = {"zero3", "alone"}
"""Rows of ``make test``; ``make verify-all`` has all."""


@cache
def pairs(*, quick: bool) -> dict[str, tuple[Result, Result]]:
    """Results of the drop-in and of DeepSpeed."""
    jobs = [job for job in JOBS if (job.name in QUICK) == quick]
    ours, theirs = results("drop-in", jobs), results("reference", jobs)
    return {job.name: (ours[job.name], theirs[job.name]) for job in jobs}


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
@pytest.mark.parametrize(
    "name",
    [pytest.param(job.name, marks=() if job.name in QUICK else pytest.mark.whole_matrix) for job in JOBS],
)
def test_twenty_steps_are_equal(name: str) -> None:
    ours, theirs = pairs(quick=name in QUICK)[name]
    assert ours.losses == pytest.approx(theirs.losses, rel=RELATIVE)
    assert ours.returned == pytest.approx(theirs.returned, rel=RELATIVE)
    assert ours.weights == pytest.approx(theirs.weights, rel=RELATIVE)
    assert ours.counters == theirs.counters
    assert ours.rates == [pytest.approx(rates, rel=1e-12) for rates in theirs.rates]
    if name != "zero0":  # DeepSpeed has no norm at stage 0 in float32
        assert ours.norms == pytest.approx(theirs.norms, rel=RELATIVE)
    assert theirs.losses[-1] < theirs.losses[0]
