"""Comparison of training with the drop-in and with DeepSpeed: losses, norms, rates, counters, weights of 20 steps.

docs/from_deepspeed.md has the bounds and the reasons for differences.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import numpy as np
import pytest

from megatron_core.verify.ranks import run_ranks
from tests.drop_in.deepspeed import SHARDS
from tests.drop_in.deepspeed.compare import Job, Result, train
from tests.drop_in.deepspeed.reference import REFERENCE, Task, ask

FLOAT32 = 2e-5
"""Float32 rounding: the sums of gradients are in another order; 20 steps of AdamW amplify it."""
BFLOAT16 = 4e-3
"""bfloat16 has 8 bits, and the losses of both differ by at most half a unit in the last place."""
FLOAT16 = 2e-2
"""DeepSpeed sums gradients in float16, with 11 bits; 20 steps with momentum amplify it to 1.2e-2."""
ADAMW = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
ADAM = {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": False}}
MOMENTUM = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 6}}
DECAY = {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 4, "total_num_steps": 16}}
COSINE = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 4, "total_num_steps": 16}}
CYCLE = {
    "type": "OneCycle",
    "params": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.02, "cycle_first_step_size": 5, "decay_step_size": 3}
    | {"decay_lr_rate": 0.1, "decay_mom_rate": 0.1},
}
CPU = {"device": "cpu"}
SUMS: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"}
"""Gradients of bfloat16 weights are summed in float32, as here in any case."""
BF16: dict[str, Any] = {"bf16": {"enabled": True}, **SUMS}
ONE_ROUNDING = {"memory_efficient_linear": False}
"""DeepSpeed's own linear function of ZeRO 3 rounds the product and its sum with the bias."""
DYNAMIC = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 3, "hysteresis": 2}
AT_ONCE = {**DYNAMIC, "hysteresis": 1, "min_loss_scale": 32}
STATIC = {"enabled": True, "loss_scale": 128}


def _config(stage: int, *, steps: int = 2, zero: dict[str, Any] | None = None, **others: Any) -> dict[str, Any]:
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": steps, "gradient_clipping": 0.5}
    allowed = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
    return (
        sizes | allowed | {"zero_optimization": {"stage": stage, **SHARDS, **(zero or {})}, "optimizer": ADAMW} | others
    )


def _without_optimizer(stage: int) -> dict[str, Any]:
    return {name: value for name, value in _config(stage).items() if name != "optimizer"}


ROWS = [
    # ZeRO, clipping, accumulation, optimizers of the program.
    Job("zero3", _config(3, scheduler=WARMUP), ranks=2),
    Job("zero3 with whole vectors", _config(3, zero={"stage3_param_persistence_threshold": 20}), ranks=2),
    Job("alone", _config(2, scheduler=WARMUP)),
    Job("zero0", _config(0, scheduler=WARMUP), ranks=2),
    Job("zero1", _config(1), ranks=2),
    Job("zero2-unclipped", _config(2, scheduler=WARMUP, gradient_clipping=0.0), ranks=2),
    Job("client", _without_optimizer(1), ranks=2, program="client"),
    Job("accumulation3-zero2", _config(2, steps=3), ranks=2, micro_steps=60),
    Job("accumulation3-zero3", _config(3, steps=3), ranks=2, micro_steps=60),
    Job("sums-zero1", _config(1, gradient_allreduce_op="sum"), ranks=2),
    Job("sums-zero2", _config(2, optimizer=MOMENTUM, gradient_allreduce_op="sum", gradient_clipping=0.0), ranks=2),
    # Offload.
    Job("optimizer-on-cpu-zero1", _config(1, zero={"offload_optimizer": CPU}), ranks=2),
    Job("optimizer-on-cpu-zero2", _config(2, zero={"offload_optimizer": CPU}), ranks=2),
    Job("optimizer-on-cpu-zero3", _config(3, zero={"offload_optimizer": CPU}), ranks=2),
    Job("weights-on-cpu-zero3", _config(3, zero={"offload_optimizer": CPU, "offload_param": CPU}), ranks=2),
    # Learning rates.
    Job("warmup-decay", _config(1, scheduler=DECAY)),
    Job("warmup-cosine", _config(1, scheduler=COSINE)),
    Job("one-cycle", _config(1, scheduler=CYCLE)),
    # Optimizers of the JSON that DeepSpeed has on a CPU without a compiler.
    Job("adam-l2-zero2", _config(2, optimizer=ADAM), ranks=2),
    Job("adagrad-zero1", _config(1, optimizer={"type": "Adagrad", "params": {"lr": 0.05}}), ranks=2),
    Job("sgd-zero3", _config(3, optimizer=MOMENTUM), ranks=2),
    Job("rmsprop-zero1", _config(1, optimizer={"type": "RMSprop", "params": {"lr": 0.003}}), ranks=2),
    # 16 bits.
    Job("bf16-zero1", _config(1, **BF16), ranks=2),
    Job("bf16-zero2", _config(2, optimizer=MOMENTUM, **BF16), ranks=2),
    Job("bf16-zero3", _config(3, optimizer=MOMENTUM, zero=ONE_ROUNDING, **BF16), ranks=2),
    Job("fp16-zero1-static", _config(1, optimizer=MOMENTUM, fp16=STATIC), ranks=2, overflows=(13,)),
    Job("fp16-zero1", _config(1, optimizer=MOMENTUM, fp16=AT_ONCE), ranks=2, overflows=(4, 7, 9, 22)),
    Job("fp16-zero2", _config(2, optimizer=MOMENTUM, fp16=DYNAMIC), ranks=2, overflows=(4, 7, 9, 22)),
    Job("fp16-zero3", _config(3, optimizer=MOMENTUM, zero=ONE_ROUNDING, fp16=DYNAMIC), ranks=2, overflows=(5, 8, 20)),
]


@pytest.mark.skipif(not REFERENCE.exists(), reason="needs DeepSpeed")
@pytest.mark.drawn(3)
@pytest.mark.parametrize("job", ROWS, ids=[job.name for job in ROWS])
def test_twenty_steps_are_equal(job: Job) -> None:
    ours = Result(**run_ranks(job.ranks, train, asdict(job))[0])
    theirs = Result(**ask(Task("tests.drop_in.deepspeed.compare:train", (asdict(job),), job.ranks)))
    bound = FLOAT16 if "fp16" in job.config else BFLOAT16 if "bf16" in job.config else FLOAT32
    assert ours.losses == pytest.approx(theirs.losses, rel=bound)
    assert ours.returned == pytest.approx(theirs.returned, rel=bound)
    assert ours.weights == pytest.approx(theirs.weights, rel=bound)
    assert ours.counters == theirs.counters
    assert ours.rates == [pytest.approx(rates, rel=1e-12) for rates in theirs.rates]
    np.testing.assert_allclose(ours.momenta, theirs.momenta, rtol=1e-12)
    assert ours.scales == theirs.scales
    if job.name != "zero0":  # DeepSpeed has no norm at stage 0 in float32
        assert ours.norms == pytest.approx(_norms_of(job, theirs), rel=5 * bound)
    assert theirs.losses[-1] < theirs.losses[0]
    assert (theirs.counters[-1][3] > 0) == bool(job.overflows)


def _norms_of(job: Job, theirs: Result) -> list[float]:
    """DeepSpeed's norms: at stage 3 it divides them by the loss scale after the step, which may have grown."""
    if job.config["zero_optimization"]["stage"] < 3:
        return theirs.norms
    updates = [at - 1 if at % 2 == 0 else at for at in range(len(theirs.norms))]  # two micro-batches in a step
    growth = [max(theirs.scales[at] / theirs.scales[at - 1], 1.0) if at > 0 else 1.0 for at in updates]
    return [norm * factor for norm, factor in zip(theirs.norms, growth, strict=True)]
