"""Compare whole training steps with torch, DDP, FSDP2, 1F1B of torch, `transformers`, DeepSpeed and Megatron Core.

A contender is a system and a layout of a model. One thread per rank; all contenders alternate in each round, and the
medians over all rounds are compared. This framework runs with monitoring as in ``pretrain_gpt.py``, and the peers over
gloo. Prints the speed relative to each peer by wall-clock time and by processor time (user and system time of all
threads of all ranks, which other programs disturb less; busy waiting for other ranks counts), and appends a table to
benchmarks/results.csv, in which ``ratio`` is that of wall-clock time.

python -m benchmarks.bench_peers

Megatron Core and DeepSpeed are those of ``make install-test``; ``--megatron`` takes a checkout of NVIDIA/Megatron-LM.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
import tyro

from benchmarks.megatron_peer import MEGATRON, megatron_step, megatron_version
from benchmarks.results import Row, append
from benchmarks.steps import LLAMA, MIXTRAL, SHAPE, Measured, Turn, time_run, time_steps
from benchmarks.torch_peers import REFERENCE, Step, deepspeed_step, pipeline_step, torch_step, transformers_step
from megatron_core.config import RunConfig
from megatron_core.config.flops import flops_per_token
from megatron_core.verify.ranks import run_ranks

UNTIED = SHAPE | {"untie_embeddings_and_output_weights": True}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}


@dataclass(frozen=True)
class Comparison:
    """A layout of a model, and its peers with the ratios of speed to reach."""

    shape: dict[str, Any]
    layout: dict[str, Any]
    peers: dict[str, float | None]
    ranks: int = 2

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks."""
        sizes = (self.layout.get(f"{axis}_model_parallel_size", 1) for axis in ("tensor", "pipeline"))
        return self.ranks // (next(sizes) * next(sizes))


COMPARISONS = {
    "dp1": Comparison(SHAPE, {}, {"torch": 1.15, "transformers": None}, ranks=1),
    "dp2": Comparison(SHAPE, {"overlap_grad_reduce": True}, {"DDP": 1.15}),
    "zero1": Comparison(SHAPE, {"zero_stage": 1} | OVERLAP, {"ZeRO-1": 1.25, "DDP": None, "DeepSpeed 1": None}),
    "zero3": Comparison(SHAPE, {"zero_stage": 3} | OVERLAP, {"FSDP2": 1.4, "DeepSpeed 3": None}),
    "tp2": Comparison(SHAPE, TP2, {"Megatron": 1.5}),
    "tp2 sp": Comparison(SHAPE, TP2 | {"sequence_parallel": True}, {"Megatron": 2.0}),
    "pp2": Comparison(UNTIED, PP2, {"1F1B": 1.3}),
    "tp2 pp2": Comparison(UNTIED, TP2 | PP2, {"Megatron": 1.6}, ranks=4),
    "llama dp1": Comparison(LLAMA, {}, {"transformers": 1.15}, ranks=1),
    "llama tp2": Comparison(LLAMA, TP2, {"Megatron": 1.6}),
    "moe dp2 ep2": Comparison(MIXTRAL, {"expert_model_parallel_size": 2}, {"Megatron": 1.5}),
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the times of training steps."""

    rounds: int = 3
    """Number of rounds."""
    steps: int = 4
    """Timed steps per round, after one warm-up step."""
    micro_batches: int = 8
    """Micro-batches of each data-parallel rank per step."""
    comparisons: tuple[str, ...] = tuple(COMPARISONS)
    """Layouts to compare."""
    megatron: Path | None = MEGATRON if MEGATRON.exists() else None
    """Folder with Megatron Core; without it, and without DeepSpeed, their contenders are left out."""
    gloo: bool = False
    """Also run this framework over gloo."""


def peer_step(peer: str, comparison: Comparison, settings: Settings) -> Step:
    """Set up a peer's step."""
    shape, micro_batches = comparison.shape, settings.micro_batches
    if peer == "Megatron":
        assert settings.megatron is not None, "main leaves out Megatron without its folder"
        return megatron_step(settings.megatron, shape, comparison.layout, micro_batches)
    if peer == "1F1B":
        return pipeline_step(shape, micro_batches)
    make = {"transformers": transformers_step, "DeepSpeed": deepspeed_step}.get(peer.split()[0], torch_step)
    return make(peer.split()[-1], shape, micro_batches)


def rank_of(system: str, comparison: Comparison, settings: Settings) -> Turn:
    """One rank of a contender; this framework's system is ``ours`` or ``gloo``."""
    if system not in ("ours", "gloo"):
        return time_steps(partial(peer_step, system, comparison, settings), settings.steps)
    samples = settings.micro_batches * comparison.replicas * comparison.shape["micro_batch_size"]
    return time_run(comparison.shape | comparison.layout | {"global_batch_size": samples}, settings.steps)


def measure(settings: Settings) -> dict[tuple[str, str], Measured]:
    """Run all contenders alternately; a peer that several layouts share runs once per round."""
    missing = {"Megatron"} if settings.megatron is None else set()
    missing |= set() if REFERENCE.is_dir() else {"DeepSpeed 1", "DeepSpeed 3"}
    found: dict[tuple[str, str], Measured] = {}
    for _ in range(settings.rounds):
        for name in settings.comparisons:
            comparison = COMPARISONS[name]
            ours = ("ours", "gloo") if settings.gloo and comparison.ranks > 1 else ("ours",)
            for system in (*ours, *(peer for peer in comparison.peers if peer not in missing)):
                backend = "auto" if system == "ours" else "gloo"
                turns = run_ranks(
                    comparison.ranks, rank_of, system, comparison, settings, backend=backend, timeout=900.0
                )
                tokens = settings.micro_batches * comparison.replicas
                tokens *= comparison.shape["micro_batch_size"] * comparison.shape["seq_length"]
                found.setdefault((name, system), Measured(comparison.ranks, tokens)).add(turns)
                print(".", end="", flush=True)
    print()
    return found


def matmul_flops(size: int = 1024, repeats: int = 10) -> float:
    """FLOP/s of float32 matrix products of this size on one thread, the best of ``repeats`` by processor time."""
    torch.set_num_threads(1)
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = min(time_steps(lambda: lambda: a @ b, repeats).processor)
    return 2 * size**3 / best


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    found = measure(settings)
    peak = run_ranks(1, matmul_flops)[0]
    print(f"one thread's matrix products: {peak / 1e9:.1f} GFLOP/s")
    print(
        f"{'':30}{'tokens/s':>10}{'of peak':>9}{'CPU s':>8}{'of peak':>9}{'MiB':>6}{'speed':>7}{'by CPU':>8}{'aim':>6}"
    )
    rows = []
    for (name, system), entry in found.items():
        comparison, rate, spent = COMPARISONS[name], entry.tokens_per_second, statistics.median(entry.processor)
        model = RunConfig.from_flat(comparison.shape).model
        per_token = flops_per_token(model, comparison.shape["seq_length"], comparison.shape["vocab_size"])
        of_peak = rate * per_token / (peak * entry.world_size)
        of_spent = entry.tokens * per_token / (peak * spent)
        ours = found[name, "ours"]
        ratio, by_processor = ours.tokens_per_second / rate, spent / statistics.median(ours.processor)
        aim = comparison.peers.get(system)
        shown = "" if system == "ours" else f"{ratio:7.2f}{by_processor:8.2f}" + (f"{aim:6.2f}" if aim else "")
        of_peaks = f"{of_peak:9.1%}{spent:8.3f}{of_spent:9.1%}"
        print(f"{name:14}{system:16}{rate:10.0f}{of_peaks}{entry.memory / 2**20:6.0f}{shown}")
        if system == "ours":
            print(f"{'':14}monitoring: {1e3 * entry.monitoring:.2f} ms a step ({entry.monitoring / spent:.2%})")
            rows.append(Row(name, rate, "tokens/s", of_peak, entry.memory, None))
        else:
            rows.append(Row(f"{name}, {system}", rate, "tokens/s", of_peak, entry.memory, ratio))
        rows.append(Row(f"{name}, {system}, processor time", spent, "s", of_spent, None, by_processor))
    others = "" if settings.megatron is None else f", {megatron_version(settings.megatron)}"
    append("bench_peers", rows, peer=f"transformers {transformers.__version__}, deepspeed 0.19.8{others}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
