"""Validation losses and traffic of two groups of replicas that exchange every 32 steps, on text of Python's library.

The model and its steps are those of ``bench_fp8_loss``, in float32, with the same tokens in all runs; the validation
text is the last tenth of the library. The first half of the steps is synchronous in all runs, as published trainings of
this kind begin. Prints a table and appends it to benchmarks/results.csv; ``ratio`` there is relative to synchronous
training. Bytes are those that a rank sends to the other group in the second half, with reports of losses.

python -m benchmarks.bench_outer
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from tempfile import TemporaryDirectory

import numpy as np
import tyro

from benchmarks.bench_fp8_loss import Settings, configuration, text
from benchmarks.results import Row, append
from megatron_core.datasets.base import Sample
from megatron_core.features.outer_steps.part import OuterSteps
from megatron_core.reports.meter import METER, StepTimes
from megatron_core.training.setup import set_up
from megatron_core.training.step import evaluate, train_step
from megatron_core.verify.ranks import run_ranks, this_world

WHOLE = "synchronous"
GROUPS = {"outer_steps": 32, "outer_lr": 0.9, "outer_momentum": 0.3}
STREAMS = GROUPS | {"outer_fragments": 2, "outer_delay": 2, "outer_alpha": 0.5}
RUNS: dict[str, dict[str, object]] = {
    WHOLE: {},
    "H = 32": GROUPS,
    "H = 32, fp4": GROUPS | {"outer_exchange": "fp4"},
    "H = 32, 2 fragments, delay 2": STREAMS,
}
"""Ten exchanges are too few for a momentum of 0.9."""


@dataclass(frozen=True, kw_only=True)
class Compared(Settings):
    """Compare groups of replicas with synchronous training."""

    steps: int = 640
    """Number of optimizer steps."""
    batch: int = 8
    """Sequences of each group per step."""
    evaluated: int = 32
    """Number of batches of the validation."""
    only: tuple[str, ...] = ()
    """Runs to do, with the synchronous one; default: all."""


@dataclass(frozen=True)
class Part:
    """Pieces of the text from the share ``first`` to ``last``, at positions that depend only on their number."""

    sequence_length: int
    first: float
    last: float

    def __getitem__(self, index: int) -> Sample:
        begin, end = (int(share * len(text())) for share in (self.first, self.last))
        start = begin + int(np.random.default_rng(index).integers(end - begin - self.sequence_length - 1))
        tokens = text()[start : start + self.sequence_length + 1].astype(np.int64)
        return Sample(tokens=tokens[:-1], labels=tokens[1:], loss_mask=np.ones(self.sequence_length, dtype=np.float32))


def trained(settings: Compared, name: str, folder: str) -> tuple[float, float]:
    """The validation loss, and the bytes that this rank has sent to the other in the second half."""
    own = {"global_batch_size": 2 * settings.batch, "bf16": False, "save": folder, "load": folder}
    own |= {"micro_batch_size": settings.batch, "ckpt_step": None if name == WHOLE else settings.steps // 2}
    run = set_up(configuration(settings, own | RUNS[name]), this_world())
    run.train_loader = run.loader(Part(settings.length, 0.0, 0.9))
    METER.start(run.groups, run.world.device)
    total = StepTimes()
    while run.state.iteration < settings.steps:
        train_step(run)
        times = METER.take()
        if run.state.iteration > settings.steps // 2:
            total.add(times)
        if run.state.iteration == settings.steps // 2:
            run.saver.save(run.state)
    METER.stop()
    held_out = Part(settings.length, 0.9, 1.0)
    sent = sum(traffic.bytes for traffic in total.traffic.values())
    groups = run.part(OuterSteps)
    with nullcontext() if groups is None else groups.outer.global_weights():
        return evaluate(run, held_out, settings.evaluated), sent


def main(settings: Compared) -> None:
    """Train every run, and compare."""
    names = [name for name in RUNS if name in {WHOLE, *(settings.only or RUNS)}]
    with TemporaryDirectory() as folder:
        done = {name: run_ranks(2, trained, settings, name, folder, timeout=1800.0)[0] for name in names}
    rows = []
    print(f"{'run':30} {'validation':>10} {'to whole':>9} {'MB sent':>8}")
    for name, (loss, sent) in done.items():
        ratio, less = loss / done[WHOLE][0], sent / done[WHOLE][1]
        print(f"{name:30} {loss:10.4f} {ratio - 1.0:+9.3%} {sent / 1e6:8.1f}")
        rows += [Row(name, loss, "nats", ratio=ratio), Row(f"{name}, sent", sent / 1e6, "MB", ratio=less)]
    if settings.keep:
        append("outer_loss", rows)


if __name__ == "__main__":
    main(tyro.cli(Compared))
