"""Peak memory and time of log-probabilities and of a step: complete logits against chunks of them.

Each case is a process of its own, with SmolLM2-135M's width and vocabulary and two of its layers. The peak is the
growth of resident memory during the call. Results are appended to benchmarks/results.csv; ratio there is complete /
chunks.

python -m benchmarks.bench_log_probs
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch
import tyro

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.post_training import Trainer, Trajectory, objectives
from megatron_core.verify.ranks import run_ranks, this_world
from tests.memory import give_back, resident, start_anew

MODEL = {
    "num_layers": 2,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "group_query_attention": True,
    "num_query_groups": 3,
    "ffn_hidden_size": 1536,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "vocab_size": 49152,
    "micro_batch_size": 1,
    "global_batch_size": 1,
    "train_iters": 1,
    "dataloader_type": "external",
}
CHUNKS = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "linear"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare complete logits with chunks."""

    tokens: int = 2048
    """Tokens of a row."""
    repeats: int = 3
    """Number of timed calls, of which the fastest is reported."""


def measure(call: str, settings: dict[str, Any], tokens: int, repeats: int) -> tuple[int, float]:
    """The growth of memory in bytes, and seconds."""
    start_anew()
    trainer = Trainer(RunConfig.from_flat(MODEL | {"seq_length": tokens} | settings), this_world())
    text = torch.randint(0, 49152, (tokens + 1,), generator=torch.Generator().manual_seed(0)).tolist()
    texts = [Trajectory(text, [1] * tokens)]
    with_entropy = replace(objectives.cross_entropy(), entropy_coefficient=0.1)
    calls = {
        "log_probs": lambda: trainer.log_probs(texts),
        "train_on": lambda: trainer.train_on(texts, objectives.cross_entropy()),
        "log_probs with entropy": lambda: trainer.log_probs(texts, temperature=0.7, with_entropy=True),
        "train_on with entropy": lambda: trainer.train_on(texts, with_entropy, temperature=0.7),
    }
    calls[call]()
    give_back()
    start_anew()
    before = resident("VmRSS")
    calls[call]()
    growth = resident("VmHWM") - before
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        calls[call]()
        seconds.append(time.perf_counter() - began)
    return growth, min(seconds)


def main(settings: Settings) -> None:
    """Measure both calls with both ways, print and append the results."""
    rows = []
    for call in ("log_probs", "train_on", "log_probs with entropy", "train_on with entropy"):
        found = {}
        for name, flags in (("complete", {}), ("chunks", CHUNKS)):
            ((growth, seconds),) = run_ranks(1, measure, call, flags, settings.tokens, settings.repeats, timeout=600.0)
            found[name] = growth, seconds
            print(f"{call}, {name}: {growth / 2**20:.0f} MiB, {seconds:.2f} s", flush=True)
        (complete, slow), (chunks, fast) = found["complete"], found["chunks"]
        rows.append(Row(f"memory of {call}", chunks / 2**20, "MiB", ratio=complete / chunks))
        rows.append(Row(f"time of {call}", fast, "s", ratio=slow / fast))
    append("bench_log_probs", rows)


if __name__ == "__main__":
    main(tyro.cli(Settings))
