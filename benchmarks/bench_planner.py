"""Compare the planner's predictions with published and measured steps.

``--published`` predicts the steps of published tables (benchmarks/published_steps.json: each row with its source) and
prints the errors of both halves (the constants of each kind of GPU were fitted only on the first half of each table)
and of blind tables, of which no row was fitted. ``--fit h100`` repeats the fit. Without these flags, a small model is
trained in many layouts on this machine, each predicted before with the file of ``tools/diagnose.py --machine``; the
layouts alternate in each round, and the shortest step of each is used, as in that file, because the model does not
include other load.

    python -m benchmarks.bench_planner --published
    python -m benchmarks.bench_planner --hardware machine.json
"""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

from benchmarks.results import Row, append
from benchmarks.steps import time_steps
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.parallel import World
from megatron_core.planner.cost import LayerTimes, Pipeline, cost_of, step_cost
from megatron_core.planner.hardware import Hardware, Link, read_hardware
from megatron_core.planner.layer_time import LayerClock, Passes
from megatron_core.planner.layout import Layout
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

PUBLISHED = Path(__file__).with_name("published_steps.json")
SHAPE = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 128,
    "vocab_size": 2048,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "train_iters": 1000,
    "global_batch_size": 8,
}
LAYOUTS = (
    "1 process",
    "dp2",
    "dp2 zero1",
    "dp2 zero2",
    "dp2 zero3",
    "tp2",
    "tp2 sp",
    "cp2",
    "pp2",
    "pp2 v2",
    "pp2 gpipe",
    "pp2 zb_h1",
    "pp2 zb_v",
)
"""With micro-batches of one sequence, and some of these again with four."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare predicted and measured times of steps."""

    published: bool = False
    """Predict the steps of published tables."""
    verbose: bool = False
    """With --published: print each row."""
    fit: str | None = None
    """Fit the constants of this kind of GPU to the first half of each table, and print them as a hardware file."""
    hardware: str = "machine.json"
    """File written by tools/diagnose.py --machine."""
    rounds: int = 3
    """Number of rounds."""
    steps: int = 4
    """Timed steps per round, after one warm-up step."""


@dataclass(frozen=True)
class Step:
    """A row of a published table."""

    id: str
    table: str
    hardware: str
    world_size: int
    seconds: float
    source: str
    note: str
    config: RunConfig
    half: int
    """0: may be fitted, 1: only predicted; every second row of each table, all rows of blind tables."""
    blind: bool = False
    """Whether no row of the table was fitted."""
    nvidia: bool = False
    """Whether the program was NeMo or Megatron-LM with the features of ``NvidiaClock``."""

    @property
    def comparable(self) -> bool:
        """Whether this framework has the algorithm."""
        return "not comparable" not in self.note

    def predicted(self, hardware: Hardware) -> float:
        """Seconds."""
        kind = NvidiaClock if self.nvidia else LayerClock
        clock = kind(self.config, hardware, self.world_size, self.config.data.vocab_size or 0)
        return cost_of(Pipeline(self.config, self.world_size, clock, LayerTimes(clock))).seconds


class NvidiaClock(LayerClock):
    """Features of NeMo and Megatron-LM with Transformer Engine that this framework does not have.

    Weights stay in 8 bits over the micro-batches of a step, and matrices are read once for quantisation; gathers and
    sums of tensor-parallel ranks overlap with their matrix products, except the first of t pieces; a row is sent to one
    of its expert's tensor ranks, which gather it.
    """

    def casts(self, rows: float, inputs: float, outputs: float) -> tuple[float, float, float]:
        each = self.elements(self.bytes + 2) * rows
        return each * inputs, each * outputs, 0.0

    def pair(
        self, rows: float, inputs: float, inner_in: float, inner_out: float, outputs: float, *, joined: bool = False
    ) -> Passes:
        found = super().pair(rows, inputs, inner_in, inner_out, outputs, joined=joined)
        if not self.config.parallel.tp_comm_overlap:
            return found
        forward, backward = ({**kinds, "tp": kinds["tp"] / self.tp} for kinds in (found.forward, found.input_grad))
        return Passes(forward, backward, found.weight_grad, found.hidden / self.tp)

    def exchange(self) -> float:
        model, parts = self.config.model, self.config.parallel.expert_tensor_size
        sent = self.bytes * self.tokens / self.tp * model.hidden_size * model.moe_router_topk
        return self.rings.ring("ep").all_to_all(sent) + self.rings.ring("etp").gather(sent * parts)


def published_steps() -> list[Step]:
    """All rows; the first of every pair of a table's rows may be fitted."""
    seen: dict[tuple[str, str], int] = {}
    found = []
    for row in json.loads(PUBLISHED.read_text(encoding="utf-8")):
        settings = {name: tuple(v) if isinstance(v, list) else v for name, v in row.pop("settings").items()}
        key = row["hardware"], row["table"]
        seen[key] = seen.get(key, -1) + ("not comparable" not in row["note"])
        half = 1 if row.get("blind") else seen[key] % 2
        found.append(Step(**row, config=RunConfig.from_flat(settings), half=half))
    return found


def errors(steps: Sequence[Step], hardware: Hardware | None = None) -> list[tuple[Step, float]]:
    """Each step with its relative error."""
    known = {name: hardware or read_hardware(name) for name in {step.hardware for step in steps}}
    return [(step, step.predicted(known[step.hardware]) / step.seconds - 1) for step in steps]


def summary(found: Sequence[tuple[Step, float]]) -> Iterator[str]:
    """Mean and worst error of each half: over all rows, by kind of GPU, by table."""
    parts: dict[str, list[tuple[Step, float]]] = {}
    for step, error in found:
        title = "blind tables" if step.blind else ("fitted half", "judged half")[step.half]
        parts.setdefault(title if step.comparable else "not comparable", []).append((step, error))
    for title, chosen in sorted(parts.items(), key=lambda part: ORDER.index(part[0])):
        groups = {"all": chosen}
        for step, error in chosen:
            groups.setdefault(step.hardware, []).append((step, error))
        for step, error in chosen:
            groups.setdefault(f"  {step.hardware}, {step.table}", []).append((step, error))
        yield f"{title:40} {'rows':>4} {'mean error':>10} {'bias':>7} {'worst':>6}"
        for name, rows in groups.items():
            sizes = [abs(e) for _, e in rows]
            bias = statistics.mean(e for _, e in rows)
            yield f"  {name:38} {len(rows):4} {statistics.mean(sizes):10.1%} {bias:+7.1%} {max(sizes):6.0%}"


ORDER = ("fitted half", "judged half", "blind tables", "not comparable")

START: dict[str, dict[str, Any]] = {
    "a100": {
        "product_flops": {"bfloat16": 265e12, "float32": 130e12, "float64": 18e12},
        "memory_bandwidth": 1.6e12,
        "intra": Link(bandwidth=230e9, latency=5e-6),
        "inter": Link(bandwidth=20e9, latency=12e-6),
        "overlap": 0.85,
    },
    "h100": {
        "product_flops": {"bfloat16": 760e12, "float8": 1340e12, "float32": 50e12, "float64": 55e12},
        "memory_bandwidth": 2.6e12,
        "intra": Link(bandwidth=340e9, latency=5e-6),
        "inter": Link(bandwidth=42e9, latency=12e-6),
        "overlap": 0.95,
    },
}
"""Initial values: results of benchmarks of single operations and of NCCL's tests on these machines."""
GUESS: dict[str, Any] = {
    "product_edge": 40.0,
    "attention_efficiency": 0.5,
    "launch_seconds": 4e-6,
    "step_seconds": 0.02,
}
FITTED = {
    "bfloat16": (0.6, 1.1),
    "float8": (0.8, 1.05),
    "product_edge": (0.2, 6.0),
    "attention_efficiency": (0.5, 1.4),
    "memory_bandwidth": (0.5, 1.2),
    "launch_seconds": (0.3, 4.0),
    "intra": (0.6, 1.2),
    "inter": (0.6, 1.2),
    "step_seconds": (0.1, 3.0),
    "overlap": (0.5, 1.05),
}
"""Fitted constants, and bounds of their factors relative to the file's values."""


def scaled(hardware: Hardware, factors: dict[str, float]) -> Hardware:
    """The machine with each constant times its factor."""
    changes: dict[str, Any] = {}
    for name, factor in factors.items():
        if name in hardware.product_flops:
            rates = changes.get("product_flops", hardware.product_flops)
            changes["product_flops"] = {dtype: rate * (factor if dtype == name else 1) for dtype, rate in rates.items()}
        elif name in ("intra", "inter"):
            link = getattr(hardware, name)
            changes[name] = replace(link, bandwidth=link.bandwidth * factor)
        else:
            changes[name] = getattr(hardware, name) * factor
    return replace(hardware, **changes)


def fit(name: str) -> Hardware:
    """Coordinate search for the least mean error of the first halves, with tables weighted by the root of their rows; a
    small penalty keeps undetermined constants unchanged."""
    start = replace(read_hardware(name), **START.get(name, {}), **GUESS)
    steps = [step for step in published_steps() if step.hardware == name and step.half == 0 and step.comparable]
    if not steps:
        raise ConfigError(f"fit={name!r} has no published steps; legal: a100, h100")
    weight = {s.table: 1 / math.sqrt(sum(o.table == s.table for o in steps)) for s in steps}

    def loss(factors: dict[str, float]) -> float:
        found = errors(steps, scaled(start, factors))
        each = (weight[s.table] * (abs(math.log(1 + e)) + 2 * max(abs(e) - 0.2, 0.0)) for s, e in found)
        return sum(each) / sum(weight[s.table] for s in steps) + 1e-3 * sum(math.log(f) ** 2 for f in factors.values())

    fitted = {key: ends for key, ends in FITTED.items() if key != "float8" or key in start.product_flops}
    factors, width = dict.fromkeys(fitted, 1.0), 0.25
    least = loss(factors)
    while width > 0.03:
        improved = False
        for key, (low, high) in fitted.items():
            for step in (1 + width, 1 / (1 + width)):
                tried = factors | {key: min(max(factors[key] * step, low), high)}
                if tried[key] != factors[key] and (found := loss(tried)) < least - 1e-5:
                    least, factors, improved = found, tried, True
        print(f"steps of {width:.0%}: {least:.4f}", file=sys.stderr)
        width = width if improved else width / 2
    return scaled(start, factors)


def _rank(config: RunConfig, steps: int) -> list[float]:
    torch.set_num_threads(1)
    run = set_up(config, World(dist.get_rank(), dist.get_world_size(), local_rank=0, device=torch.device("cpu")))
    return time_steps(lambda: lambda: train_step(run), steps).seconds


def on_this_machine(settings: Settings) -> list[Row]:
    """Compare predictions with measurements; rank correlation (Spearman) and mean error."""
    hardware = read_hardware(settings.hardware)
    points = [(layout, 1) for layout in LAYOUTS] + [(layout, 4) for layout in ("1 process", "dp2", "tp2 sp", "cp2")]
    chosen: dict[str, tuple[int, RunConfig]] = {}
    for text, micro in points:
        layout = Layout.parse(text)
        config = RunConfig.from_flat(SHAPE | layout.settings() | {"micro_batch_size": micro})
        chosen[f"{text} mbs{micro}"] = layout.world_size, config
    seconds: dict[str, list[float]] = {name: [] for name in chosen}
    for _ in range(settings.rounds):
        for name, (world_size, config) in chosen.items():
            ranks = run_ranks(world_size, _rank, config, settings.steps, timeout=300.0)
            seconds[name] += [max(each) for each in zip(*ranks, strict=True)]
    rows, pairs = [], []
    for name, (world_size, config) in chosen.items():
        expected = step_cost(config, world_size, hardware, int(str(SHAPE["vocab_size"]))).seconds
        found = min(seconds[name])
        pairs.append((expected, found))
        error = expected / found - 1
        print(f"{name:20} predicted {expected:7.3f} s, measured {found:7.3f} s, {error:+.0%}")
        rows.append(Row(name, found, "s", ratio=expected / found))
    error = statistics.mean(abs(a / b - 1) for a, b in pairs)
    print(f"{len(pairs)} layouts: rank correlation {correlation(pairs):.3f}, mean error {error:.1%}")
    return rows


def correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's correlation, computed from the ranks."""
    ranks = [[sorted(column).index(value) for value in column] for column in zip(*pairs, strict=True)]
    return statistics.correlation(*ranks)


def main(settings: Settings) -> None:
    """Run the requested comparison."""
    if settings.fit is not None:
        print(json.dumps(asdict(fit(settings.fit)), indent=2))
    elif settings.published:
        found = errors(published_steps())
        for step, error in found if settings.verbose else ():
            print(f"{step.id:28} {step.hardware:10} {step.world_size:5} ranks, {step.seconds:8.3f} s {error:+.0%}")
        print("\n".join(summary(found)))
    else:
        append("planner", on_this_machine(settings))


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
