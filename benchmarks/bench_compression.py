"""Training losses and bytes sent with compressed gradients, on two CPU ranks, on the source text of Python's library.

The model, text and steps are those of ``bench_fp8_loss``, in float32. Prints a table and appends it to
benchmarks/results.csv; ``ratio`` there is the loss over the last steps relative to uncompressed gradients with the same
clipping; bytes are a rank's contribution to sums of gradients.

python -m benchmarks.bench_compression
"""

from __future__ import annotations

import statistics

import torch.distributed as dist
import tyro

from benchmarks.bench_fp8_loss import Settings, Windows, configuration
from benchmarks.results import Row, append
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks, this_world

WHOLE, UNCLIPPED = "whole", "whole, no clipping"
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
}
"""The reference run of each run."""
WARM_UP = 0.2
"""Share of the steps before compression starts, as recommended by the authors of 1-bit Adam."""


def losses(settings: Settings, name: str) -> tuple[list[float], int]:
    """The loss of each step, and the bytes that this rank has contributed."""
    own = {"grad_compression_warmup_iters": round(WARM_UP * settings.steps), "bf16": False}
    batch = {"global_batch_size": settings.batch * dist.get_world_size()}
    run = set_up(configuration(settings, own | batch | RUNS[name][1]), this_world())
    run.train_loader = run.loader(Windows(settings.length))
    found = [train_step(run).loss for _ in range(settings.steps)]
    return found, sum(bucket.wire_bytes for bucket in run.data_parallel.buckets)


def main(settings: Settings) -> None:
    """Train every run, and compare."""
    done = {name: run_ranks(2, losses, settings, name, timeout=900.0)[0] for name in RUNS}
    ends = {name: statistics.fmean(curve[-settings.last :]) for name, (curve, _) in done.items()}
    rows = []
    print(f"{'run':20} {'loss':>8} {'to whole':>9} {'MB sent':>8}")
    for name, (peer, _) in RUNS.items():
        ratio, sent = ends[name] / ends[peer], done[name][1]
        print(f"{name:20} {ends[name]:8.4f} {ratio - 1.0:+9.3%} {sent / 1e6:8.1f}")
        rows += [Row(name, ends[name], "nats", ratio=ratio), Row(f"{name}, sent", sent / 1e6, "MB")]
    if settings.keep:
        append("compression_loss", rows)


if __name__ == "__main__":
    main(tyro.cli(Settings))
