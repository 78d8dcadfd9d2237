"""Compare ZeRO stages 0 to 3 with torch's DDP and FSDP2 and DeepSpeed's ZeRO, training the same GPT on two ranks.

The model of all contenders is this framework's GPT, the optimizer AdamW (torch's fused one for the peers), with
clipping. The peers use gloo; DeepSpeed is included if it is installed. One thread per rank; contenders alternate in
each round, and medians over all rounds are compared. Prints a table and appends it to benchmarks/results.csv; ``ratio``
there is the time relative to the peer: DDP for stages 0 and 1, FSDP2 for 2 (weights are kept after forward) and 3.

python -m benchmarks.bench_data_parallel
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.models import GPTModel
from megatron_core.monitor.device import peak_memory_bytes
from megatron_core.parallel import ParallelGroups, World
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.micro_batch import SequenceDetails
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

SHAPE = {
    "num_layers": 8,
    "hidden_size": 384,
    "num_attention_heads": 6,
    "seq_length": 256,
    "vocab_size": 8192,
    "micro_batch_size": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "untie_embeddings_and_output_weights": True,
    "mock_data": True,
    "train_iters": 1000,
    "lr_decay_style": "constant",
}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
OURS: dict[str, dict[str, object]] = {
    "stage 0": {"overlap_grad_reduce": True},
    "stage 1": {"zero_stage": 1, **OVERLAP},
    "stage 2": {"zero_stage": 2, **OVERLAP},
    "stage 3": {"zero_stage": 3, **OVERLAP},
}
DEEPSPEED = ("DeepSpeed 1", "DeepSpeed 2", "DeepSpeed 3")
PEERS = {"stage 0": "DDP", "stage 1": "DDP", "stage 2": "FSDP2, kept", "stage 3": "FSDP2"}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the times of training steps on two ranks."""

    rounds: int = 2
    """Number of rounds."""
    steps: int = 4
    """Timed steps per round, after one warm-up step."""
    micro_batches: int = 2
    """Micro-batches of each rank per step."""


Turn = tuple[list[float], int]
"""Seconds of a rank's steps, and the increase of its peak memory by setup and steps."""


def time_steps(make: Callable[[], Callable[[], object]], steps: int) -> Turn:
    """Set up, run a warm-up step, and time the next steps."""
    before = peak_memory_bytes()
    step = make()
    step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds, peak_memory_bytes() - before


def ours(flags: dict[str, object], settings: Settings) -> Turn:
    """One rank of this framework."""

    def make() -> Callable[[], object]:
        world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
        batch = settings.micro_batches * world.size * int(str(SHAPE["micro_batch_size"]))
        run = set_up(RunConfig.from_flat(SHAPE | {"global_batch_size": batch} | flags), world)
        return lambda: train_step(run)

    return time_steps(make, settings.steps)


def theirs(kind: str, settings: Settings) -> Turn:
    """One rank of torch's data parallelism, with gradients synchronised once per step if supported."""
    return time_steps(lambda: _peer_step(kind, settings), settings.steps)


def _peer_step(kind: str, settings: Settings) -> Callable[[], object]:
    config, size = RunConfig.from_flat(SHAPE), (SHAPE["micro_batch_size"], SHAPE["seq_length"])
    vocabulary, options = config.data.vocab_size or 0, ModelParallelConfig()
    groups = ParallelGroups(Grid(dp=dist.get_world_size()), dist.get_rank())
    gpt = GPTModel(config.model, vocabulary, config.max_positions, parallel=options, groups=groups)
    batches = [torch.randint(0, vocabulary, size) for _ in range(settings.micro_batches)]
    return _deepspeed_step(gpt, batches, int(kind[-1])) if kind in DEEPSPEED else _torch_step(gpt, batches, kind)


def _deepspeed_step(gpt: GPTModel, batches: list[torch.Tensor], stage: int) -> Callable[[], object]:
    import deepspeed  # imported here, because it is optional

    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    config = {
        "train_micro_batch_size_per_gpu": len(batches[0]),
        "gradient_accumulation_steps": len(batches),
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=gpt, optimizer=optimizer, config=config)

    def step() -> None:
        for batch in batches:
            engine.backward(
                engine(batch, labels=batch, sequences=SequenceDetails(sample_index=torch.arange(len(batch)))).mean()
            )
            engine.step()

    return step


def _torch_step(gpt: GPTModel, batches: list[torch.Tensor], kind: str) -> Callable[[], object]:
    model: nn.Module = gpt
    if kind == "DDP":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        for unit in gpt.units()[:-1]:
            fully_shard(unit[0], reshard_after_forward=kind == "FSDP2")
        fully_shard(model, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def step() -> None:
        for number, batch in enumerate(batches):
            last = number == len(batches) - 1
            with nullcontext() if last or kind != "DDP" else model.no_sync():
                (
                    model(batch, labels=batch, sequences=SequenceDetails(sample_index=torch.arange(len(batch)))).mean()
                    / len(batches)
                ).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    turns: dict[str, list[list[Turn]]] = {}
    peers = [*dict.fromkeys(PEERS.values()), *(DEEPSPEED if find_spec("deepspeed") else ())]
    for _ in range(settings.rounds):
        for name, flags in OURS.items():
            turns.setdefault(name, []).append(run_ranks(2, ours, flags, settings, timeout=300.0))
        for name in peers:
            turns.setdefault(name, []).append(run_ranks(2, theirs, name, settings, timeout=300.0, backend="gloo"))
    seconds = {
        name: statistics.median(max(both) for ranks in rounds for both in zip(*(s for s, _ in ranks), strict=True))
        for name, rounds in turns.items()
    }
    memory = {name: max(peak for ranks in rounds for _, peak in ranks) for name, rounds in turns.items()}
    print(f"{'':14}{'ms a step':>10}{'MiB a rank':>12}{'of its peer':>13}")
    rows = []
    for name, each in seconds.items():
        ratio = each / seconds[PEERS[name]] if name in PEERS else None
        print(f"{name:14}{1000 * each:10.0f}{memory[name] / 2**20:12.0f}{f'{ratio:.2f}' if ratio else '':>13}")
        rows.append(Row(name, each, "s", None, memory[name], ratio))
    append("bench_data_parallel", rows, peer=f"torch {torch.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
