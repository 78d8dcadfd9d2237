"""Compare training steps of the same models in several layouts with `transformers` under torch's DDP.

A contender is a layout of a GPT-2; the prefix ``llama`` selects a Llama; ``gloo`` the same ranks over gloo instead of
shared memory; ``transformers`` its model under DistributedDataParallel over gloo. One thread per rank; contenders
alternate in each round, and the medians over all rounds are compared. Prints a table and appends it to
benchmarks/results.csv.

python -m benchmarks.bench_step
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import transformers
import tyro
from torch import nn

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.config.flops import flops_per_token
from megatron_core.monitor.device import peak_memory_bytes
from megatron_core.parallel import World
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

SHAPE = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 256,
    "vocab_size": 8192,
    "micro_batch_size": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "openai_gelu": True,
    "mock_data": True,
    "train_iters": 1000,
    "lr": 1e-3,
}
LLAMA = {key: value for key, value in SHAPE.items() if key != "openai_gelu"} | {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 704,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
TP2, PP2 = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LAYOUTS: dict[str, tuple[int, dict[str, object]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "tp2": (2, TP2),
    "tp2 sp": (2, TP2 | {"sequence_parallel": True}),
    "pp2": (2, PP2),
    "tp2 pp2": (4, TP2 | PP2),
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
    contenders: tuple[str, ...] = (
        "dp1", "transformers dp1", "dp2", "transformers dp2", "gloo dp2", "tp2", "gloo tp2", "tp2 sp", "gloo tp2 sp",
        "pp2", "gloo pp2", "tp2 pp2", "gloo tp2 pp2", "llama dp1", "transformers llama dp1"
    )  # fmt: skip
    """The contenders."""


@dataclass(frozen=True)
class Contender:
    """A parsed name of a contender."""

    world_size: int
    flags: dict[str, object]
    shape: dict[str, object]
    backend: str
    is_peer: bool

    @classmethod
    def parse(cls, name: str) -> Contender:
        """``[transformers | gloo] [llama] LAYOUT``."""
        layout = name.removeprefix("transformers ").removeprefix("gloo ")
        is_peer = name.startswith("transformers ")
        backend = "gloo" if is_peer or name.startswith("gloo ") else "auto"
        shape = LLAMA if layout.startswith("llama ") else SHAPE
        return cls(*LAYOUTS[layout.removeprefix("llama ")], shape, backend, is_peer)

    @property
    def replicas(self) -> int:
        """Number of data-parallel ranks."""
        return 1 if self.flags else self.world_size


@dataclass
class Measured:
    """Seconds of every timed step, and the largest memory of a rank."""

    world_size: int
    tokens: int
    seconds: list[float] = field(default_factory=list)
    memory: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks, at the median step."""
        return self.tokens / statistics.median(self.seconds)


def time_steps(step: Callable[[], object], steps: int) -> tuple[list[float], int]:
    """Seconds of ``steps`` steps after a warm-up step, and this rank's peak memory."""
    step()
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return seconds, peak_memory_bytes()


def ours(contender: Contender, settings: Settings) -> tuple[list[float], int]:
    """One rank of this framework."""
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    samples = settings.micro_batches * contender.replicas * int(str(SHAPE["micro_batch_size"]))
    batch = {"global_batch_size": samples}
    run = set_up(RunConfig.from_flat(contender.shape | batch | contender.flags), world)
    return time_steps(lambda: train_step(run), settings.steps)


def gpt2() -> nn.Module:
    """`transformers`' GPT-2."""
    config = transformers.GPT2Config(
        vocab_size=SHAPE["vocab_size"],
        n_positions=SHAPE["seq_length"],
        n_embd=SHAPE["hidden_size"],
        n_layer=SHAPE["num_layers"],
        n_head=SHAPE["num_attention_heads"],
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    """`transformers`' Llama."""
    config = transformers.LlamaConfig(
        vocab_size=LLAMA["vocab_size"],
        max_position_embeddings=LLAMA["seq_length"],
        hidden_size=LLAMA["hidden_size"],
        intermediate_size=LLAMA["ffn_hidden_size"],
        num_hidden_layers=LLAMA["num_layers"],
        num_attention_heads=LLAMA["num_attention_heads"],
        tie_word_embeddings=False,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return transformers.LlamaForCausalLM(config)


def theirs(contender: Contender, settings: Settings) -> tuple[list[float], int]:
    """One rank of `transformers`' model with torch's DDP and fused AdamW; gradients are synchronised once per step."""
    model = nn.parallel.DistributedDataParallel(llama() if "swiglu" in contender.shape else gpt2())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    shape = (SHAPE["micro_batch_size"], SHAPE["seq_length"])
    batches = [torch.randint(0, SHAPE["vocab_size"], shape) for _ in range(settings.micro_batches)]

    def step() -> None:
        for batch in batches[:-1]:
            with model.no_sync():
                (model(input_ids=batch, labels=batch).loss / len(batches)).backward()
        (model(input_ids=batches[-1], labels=batches[-1]).loss / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return time_steps(step, settings.steps)


def measure(settings: Settings) -> dict[str, Measured]:
    """Run all contenders alternately."""
    found: dict[str, Measured] = {}
    for _ in range(settings.rounds):
        for name in settings.contenders:
            contender = Contender.parse(name)
            rank, ranks = theirs if contender.is_peer else ours, contender.world_size
            results = run_ranks(ranks, rank, contender, settings, backend=contender.backend, timeout=600.0)
            tokens = settings.micro_batches * contender.replicas * SHAPE["micro_batch_size"] * SHAPE["seq_length"]
            entry = found.setdefault(name, Measured(ranks, tokens))
            entry.seconds += map(max, zip(*(seconds for seconds, _ in results), strict=True))
            entry.memory = max(entry.memory, *(memory for _, memory in results))
    return found


def matmul_flops(size: int = 1024, repeats: int = 10) -> float:
    """FLOP/s of float32 matrix products of this size on one thread, the best of ``repeats``."""
    torch.set_num_threads(1)
    a, b = torch.randn(size, size), torch.randn(size, size)
    best = min(_timed(lambda: a @ b) for _ in range(repeats))
    return 2 * size**3 / best


def _timed(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def main() -> int:
    """Measure, print, append."""
    settings = tyro.cli(Settings, description=__doc__)
    found = measure(settings)
    peak = run_ranks(1, matmul_flops)[0]
    print(f"one thread's matrix products: {peak / 1e9:.1f} GFLOP/s")
    print(f"{'':24}{'tokens/s':>10}{'of peak':>9}{'MiB a rank':>12}{'of transformers':>17}{'of gloo':>9}")
    rows = []
    for name, entry in found.items():
        rate = entry.tokens_per_second
        model = RunConfig.from_flat(Contender.parse(name).shape).model
        per_token = flops_per_token(model, SHAPE["seq_length"], SHAPE["vocab_size"])
        of_peak = rate * per_token / (peak * entry.world_size)
        others = [found.get(f"{other} {name}") for other in ("transformers", "gloo")]
        ratios = [rate / other.tokens_per_second if other else None for other in others]
        shown = [f"{ratio:.2f}" if ratio else "" for ratio in ratios]
        print(f"{name:24}{rate:10.0f}{of_peak:9.1%}{entry.memory / 2**20:12.0f}{shown[0]:>17}{shown[1]:>9}")
        rows.append(Row(name, rate, "tokens/s", of_peak, entry.memory, ratios[0]))
        if ratios[1]:
            rows.append(Row(f"{name} relative to gloo", rate, "tokens/s", of_peak, entry.memory, ratios[1]))
    append("bench_step", rows, peer=f"transformers {transformers.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
