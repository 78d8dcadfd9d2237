"""Losses, bytes sent and times of steps with compressed gradients, on two CPU ranks, on the source of Python's library.

The model, text and steps are those of ``bench_fp8_loss``, in float32. Prints a table and appends it to
benchmarks/results.csv; ``ratio`` there is relative to uncompressed gradients with the same optimizer and clipping: of
the loss over the last steps, and of the median time of these steps. Bytes are a rank's contribution to gradient sums.

python -m benchmarks.bench_compression --only "1-bit LAMB"
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch.distributed as dist
import tyro

from benchmarks.bench_fp8_loss import Settings, Windows, configuration
from benchmarks.results import Row, append
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks, this_world

WHOLE, UNCLIPPED = "whole", "whole, no clipping"
LAMB, UNCORRECTED = "whole LAMB", "whole, no bias correction"
OF_LAMB = {"optimizer": "lamb", "lamb_bias_correction": "none", "clip_grad": 0.0, "lr": 1e-2}
OF_ADAM = {"adam_bias_correction": False, "clip_grad": 0.0}
RUNS: dict[str, tuple[str, dict[str, object]]] = {
    WHOLE: (WHOLE, {}),
    "bf16": (WHOLE, {"grad_compression": "bf16"}),
    "PowerSGD, rank 4": (WHOLE, {"grad_compression": "powersgd", "powersgd_rank": 4}),
    UNCLIPPED: (UNCLIPPED, {"clip_grad": 0.0}),
    "1-bit Adam": (UNCLIPPED, {"grad_compression": "onebit-adam", "clip_grad": 0.0}),
    "1-bit Adam, ZeRO 1": (
        UNCLIPPED,
        {"grad_compression": "onebit-adam", "clip_grad": 0.0, "zero_stage": 1, "overlap_grad_reduce": True},
    ),
    "1-bit Adam, clipping": (WHOLE, {"grad_compression": "onebit-adam"}),
    "PowerSGD, ZeRO 2": (
        WHOLE,
        {"grad_compression": "powersgd", "powersgd_rank": 4, "zero_stage": 2, "overlap_grad_reduce": True},
    ),
    LAMB: (LAMB, OF_LAMB),
    "1-bit LAMB": (LAMB, OF_LAMB | {"grad_compression": "onebit-lamb"}),
    "1-bit LAMB, ZeRO 2": (
        LAMB,
        OF_LAMB | {"grad_compression": "onebit-lamb", "zero_stage": 2, "overlap_grad_reduce": True},
    ),
    UNCORRECTED: (UNCORRECTED, OF_ADAM),
    "0/1 Adam": (
        UNCORRECTED,
        OF_ADAM
        | {"grad_compression": "zero-one-adam", "zero_one_local_step_scaler": 60, "zero_one_local_step_clipper": 8},
    ),
}
"""The reference run of each run."""
WARM_UP = 0.2
"""Share of the steps before compression starts, as recommended by the authors of 1-bit Adam."""


@dataclass(frozen=True, kw_only=True)
class Compared(Settings):
    """Compare the losses of compressed and uncompressed training."""

    only: tuple[str, ...] = ()
    """Runs to do, with their references; default: all."""


def losses(settings: Settings, name: str) -> tuple[list[float], int, float]:
    """The loss of each step, the bytes that this rank has contributed, and the median time of the last steps."""
    warm_up = round(WARM_UP * settings.steps)
    own = {"grad_compression_warmup_iters": warm_up, "zero_one_var_freeze_step": warm_up, "bf16": False}
    batch = {"global_batch_size": settings.batch * dist.get_world_size()}
    run = set_up(configuration(settings, own | batch | RUNS[name][1]), this_world())
    run.train_loader = run.loader(Windows(settings.length))
    found, times = [], []
    for _ in range(settings.steps):
        began = time.perf_counter()
        found.append(train_step(run).loss)
        times.append(time.perf_counter() - began)
    sent = sum(bucket.wire_bytes for bucket in run.data_parallel.buckets)
    return found, sent, statistics.median(times[-settings.last :])


def main(settings: Compared) -> None:
    """Train every run, and compare."""
    chosen = settings.only or tuple(RUNS)
    names = [name for name in RUNS if name in {*chosen, *(RUNS[each][0] for each in chosen)}]
    done = {name: run_ranks(2, losses, settings, name, timeout=900.0)[0] for name in names}
    ends = {name: statistics.fmean(curve[-settings.last :]) for name, (curve, _, _) in done.items()}
    rows = []
    print(f"{'run':26} {'loss':>8} {'to whole':>9} {'MB sent':>8} {'ms/step':>8} {'to whole':>9}")
    for name in names:
        peer, (_, sent, seconds) = RUNS[name][0], done[name]
        ratio, slower = ends[name] / ends[peer], seconds / done[peer][2]
        print(f"{name:26} {ends[name]:8.4f} {ratio - 1.0:+9.3%} {sent / 1e6:8.1f} {1e3 * seconds:8.1f} {slower:9.3f}")
        rows += [Row(name, ends[name], "nats", ratio=ratio), Row(f"{name}, sent", sent / 1e6, "MB")]
        rows.append(Row(f"{name}, step", seconds, "s", ratio=slower))
    if settings.keep:
        append("compression_loss", rows)


if __name__ == "__main__":
    main(tyro.cli(Compared))
