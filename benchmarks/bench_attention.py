"""Measure training steps whose attention cannot use torch's fused one: by blocks of queries, and by the whole formula.

A GPT in one process, with attention dropout or bounded scores, with and without packed documents; ``formula`` is
``--attention-backend unfused``. Both alternate; medians are compared. ``ratio`` in benchmarks/results.csv is the
processor time relative to ``formula``.

python -m benchmarks.bench_attention
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
import tyro

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step

SHAPE: dict[str, object] = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "seq_length": 1024,
    "vocab_size": 4096,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "hidden_dropout": 0.1,
    "mock_data": True,
    "train_iters": 1000,
    "lr": 1e-3,
}
PACKED = {"tokenizer_type": "NullTokenizer", "reset_position_ids": True, "reset_attention_mask": True}
MODELS: dict[str, dict[str, object]] = {
    "dropout": {"attention_dropout": 0.1},
    "dropout, packed": {"attention_dropout": 0.1} | PACKED,
    "bounded scores": {"attention_dropout": 0.0, "attn_logit_softcapping": 30.0},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure training steps with attention dropout and bounded scores."""

    steps: int = 5
    """Timed steps of each contender, after one warm-up step."""
    models: tuple[str, ...] = tuple(MODELS)
    """The models."""
    keep: bool = True
    """Append to benchmarks/results.csv."""


def timed(run: Run) -> tuple[float, float]:
    """Return the seconds and the processor seconds of a step."""
    began, processor = time.perf_counter(), time.process_time()
    train_step(run)
    return time.perf_counter() - began, time.process_time() - processor


def main(settings: Settings) -> None:
    """Measure all models and print the table."""
    torch.set_num_threads(1)
    rows = []
    for name in settings.models:
        world = World(0, 1, 0, torch.device("cpu"))
        flags = [SHAPE | MODELS[name] | {"attention_backend": backend} for backend in ("auto", "unfused")]
        runs = [set_up(RunConfig.from_flat(each), world) for each in flags]
        for run in runs:
            train_step(run)
        steps = [[timed(run) for run in runs] for _ in range(settings.steps)]
        (blocks, processor), (formula, processor_formula) = (
            tuple(statistics.median(step[contender][kind] for step in steps) for kind in (0, 1)) for contender in (0, 1)
        )
        ratio = processor / processor_formula
        print(
            f"{name:20} {blocks:6.3f} s, formula {formula:6.3f} s; processor {processor:6.3f} s, formula "
            f"{processor_formula:6.3f} s: {ratio:.3f}",
            flush=True,
        )
        rows.append(Row(f"attention, {name}, processor time of a step", processor, "s", ratio=ratio))
        rows.append(Row(f"attention, {name}, formula, processor time of a step", processor_formula, "s"))
    if settings.keep:
        append("bench_attention", rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
