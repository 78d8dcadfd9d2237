"""Compare a program for DeepSpeed under DeepSpeed itself and under this project's drop-in, on two ranks.

The program, its JSON configuration, the model (a Llama of transformers) and torch's fused AdamW are the same; only the
package that ``import deepspeed`` finds differs. DeepSpeed uses gloo, the drop-in its default. One thread per rank;
contenders alternate in each round. Prints medians over all rounds, by wall-clock time and by processor time (user and
system time of both ranks, which other programs disturb less; busy waiting counts), and appends them to
benchmarks/results.csv; ``ratio`` there is the time relative to DeepSpeed's at the same stage.

python -m benchmarks.bench_deepspeed
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
import tyro

from benchmarks.results import Row, append
from megatron_core.drop_in import FOLDER, deactivate
from megatron_core.monitor.device import peak_memory_bytes
from megatron_core.verify.ranks import run_ranks

REFERENCE = Path(sys.prefix).resolve() / "reference"
"""The folder into which ``make install-test`` installs DeepSpeed."""
PACKAGES = {"DeepSpeed": REFERENCE, "drop-in": FOLDER}
SHAPE: dict[str, Any] = {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8}
SHAPE |= {"num_attention_heads": 6}
VOCABULARY, SAMPLES, LENGTH = 8192, 2, 256


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the times of DeepSpeed's steps on two ranks."""

    rounds: int = 3
    """Number of rounds."""
    steps: int = 4
    """Timed steps per round, after one warm-up step."""
    micro_batches: int = 2
    """Micro-batches of each rank per step."""
    stages: tuple[int, ...] = (1, 2, 3)
    """ZeRO stages."""


Turn = tuple[list[float], list[float], int]
"""Wall-clock and processor time of a rank's steps in seconds, and increase of its peak memory by setup and steps."""


def train(package: str, stage: int, settings: Settings) -> Turn:
    """One rank of the program, with the package ``deepspeed`` of ``package``."""
    deactivate()  # the drop-in has precedence over other copies
    sys.path[:] = [str(PACKAGES[package]), *(entry for entry in sys.path if Path(entry) not in PACKAGES.values())]
    os.environ |= {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": str(dist.get_rank()), "RANK": str(dist.get_rank())}
    os.environ |= {"WORLD_SIZE": str(dist.get_world_size()), "LOCAL_WORLD_SIZE": str(dist.get_world_size())}
    import deepspeed  # not before the folder is chosen

    assert PACKAGES[package] in Path(deepspeed.__file__).parents, f"{deepspeed.__file__} is not of {package}"
    before = peak_memory_bytes()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": settings.micro_batches,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": stage, "overlap_comm": False},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1_000_000,
    }
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=VOCABULARY, **SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    batches = [torch.randint(0, VOCABULARY, (SAMPLES, LENGTH)) for _ in range(settings.micro_batches)]
    seconds, processor = [], []
    for _ in range(settings.steps + 1):
        began, spent = time.perf_counter(), time.process_time()
        for batch in batches:
            engine.backward(engine(input_ids=batch, labels=batch).loss)
            engine.step()
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - spent)
    return seconds[1:], processor[1:], peak_memory_bytes() - before


def _medians(rounds: list[list[Turn]]) -> tuple[float, float, int]:
    """Median step of the slowest rank, median processor time of both ranks in seconds, and the largest memory."""
    steps = [[*zip(*(turn[kind] for turn in ranks), strict=True)] for ranks in rounds for kind in (0, 1)]
    seconds = statistics.median(max(both) for each in steps[::2] for both in each)
    processor = statistics.median(sum(both) for each in steps[1::2] for both in each)
    return seconds, processor, max(memory for ranks in rounds for *_, memory in ranks)


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    turns: dict[tuple[str, int], list[list[Turn]]] = {}
    for _ in range(settings.rounds):
        for stage in settings.stages:
            for package in PACKAGES:
                ranks = run_ranks(2, train, package, stage, settings, timeout=600.0, backend="gloo")
                turns.setdefault((package, stage), []).append(ranks)
    print(f"{'':18}{'ms a step':>10}{'CPU ms':>8}{'MiB a rank':>12}{'time':>7}{'by CPU':>8}{'memory':>8}")
    rows, found = [], {name: _medians(rounds) for name, rounds in turns.items()}
    for (package, stage), (each, spent, memory) in found.items():
        seconds, processor, peak = found["DeepSpeed", stage]
        name = f"{package} ZeRO-{stage}"
        ratios = f"{each / seconds:7.2f}{spent / processor:8.2f}{memory / peak:8.2f}"
        print(f"{name:18}{1000 * each:10.0f}{1000 * spent:8.0f}{memory / 2**20:12.0f}{ratios}")
        rows.append(Row(name, each, "s", None, memory, each / seconds))
        rows.append(Row(f"{name}, processor time", spent, "s", None, None, spent / processor))
    append("bench_deepspeed", rows, peer="deepspeed 0.19.8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
