"""Bottlenecks planted in real runs: the first cause of the diagnosis, and the effect of its first recommendation.

python -m tests.reports.bottlenecks --markdown docs/bottlenecks.md

Each run is diagnosed from its records. Then the settings of the first recommendation are applied, or the fault is
removed if it recommends other hardware; both runs alternate and are compared by tokens per second.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_core.features.experts.router import TopKRouter
from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.reports.diagnosis import Diagnosis
from megatron_core.reports.diagnosis_rules import diagnose
from megatron_core.reports.meter import METER
from megatron_core.reports.metrics import read_run
from megatron_core.reports.summary import RunSummary
from megatron_core.training.loop import train
from megatron_core.training.setup import Run
from megatron_core.verify.ranks import run_ranks
from tests.runs import tiny_run

BASE: dict[str, Any] = {
    "num_layers": 4, "hidden_size": 128, "seq_length": 64, "vocab_size": 512, "micro_batch_size": 4,
    "global_batch_size": 8, "eval_iters": 0, "replica_check_interval": None, "lr_warmup_iters": 0,
}  # fmt: skip
LARGE = {"hidden_size": 256, "vocab_size": 8192, "seq_length": 16, "micro_batch_size": 1}
"""Weights whose reduction takes longer than the few tokens of a step."""


@dataclass(frozen=True)
class Bottleneck:
    """A run with a bottleneck."""

    cause: str
    """The expected first cause."""
    settings: dict[str, Any] = field(default_factory=dict)
    fault: str = ""
    """The faults of ``plant`` in the run."""
    ranks: int = 2


BOTTLENECKS = {
    "a rank computes slowly": Bottleneck("slow rank", {"hidden_size": 64, "num_layers": 2}, "rank"),
    "a link of three is slow": Bottleneck(
        "slow link",
        {"tensor_model_parallel_size": 2, "num_layers": 2, "hidden_size": 64, "global_batch_size": 12},
        "link",
        ranks=6,
    ),
    "messages between stages are slow": Bottleneck(
        "slow messages between stages", {"pipeline_model_parallel_size": 2, "global_batch_size": 32}, "messages"
    ),
    "reading of samples is slow": Bottleneck(
        "data loading", {"num_workers": 1, "hidden_size": 32, "num_layers": 2, "global_batch_size": 32}, "reading"
    ),
    "nothing is read ahead": Bottleneck("data loading", {"num_workers": 0, "global_batch_size": 16}, "reading"),
    "checkpoints go to a slow disk": Bottleneck("checkpoint", {"save_interval": 1}, "disk"),
    "every step is saved": Bottleneck("checkpoint", {"save_interval": 1, "hidden_size": 256}),
    "every step is evaluated": Bottleneck("evaluation", {"eval_interval": 1, "eval_iters": 1}),
    "micro-batches of 16 tokens": Bottleneck(
        "small micro-batches", {"micro_batch_size": 1, "seq_length": 16, "global_batch_size": 32}, ranks=1
    ),
    "a narrow model over two tensor-parallel ranks": Bottleneck(
        "exposed communication over tp", {"tensor_model_parallel_size": 2, "hidden_size": 32, "num_layers": 8}
    ),
    "two micro-batches over two stages": Bottleneck("pipeline bubble", {"pipeline_model_parallel_size": 2}),
    "seven of eight layers on one stage": Bottleneck(
        "imbalanced stage",
        {"pipeline_model_parallel_size": 2, "decoder_last_pipeline_num_layers": 1, "num_layers": 8,
         "global_batch_size": 32},
    ),
    "the router sends all tokens to one expert": Bottleneck(
        "starving expert",
        {"num_experts": 4, "expert_model_parallel_size": 2, "moe_router_topk": 1, "moe_router_pre_softmax": True,
         "moe_ffn_hidden_size": 2048, "num_layers": 2, "global_batch_size": 16},
        "router",
    ),
    "layers are computed again without need": Bottleneck(
        "full recomputation",
        {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
        ranks=1,
    ),
    "an update of all weights for 16 tokens": Bottleneck("optimizer", LARGE | {"global_batch_size": 1}, ranks=1),
    "a sum of all gradients for 32 tokens": Bottleneck(
        "exposed communication over dp", LARGE | {"global_batch_size": 2, "optimizer": "sgd"}
    ),
}  # fmt: skip


def slower(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """``function`` after a pause."""

    def slow(*args: Any, **settings: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **settings)

    return slow


class SlowReading:
    """A data set that waits for each sample, like for a slow disk."""

    def __init__(self, dataset: Any) -> None:
        self.sequence_length, self._read = dataset.sequence_length, slower(dataset.__getitem__, 0.05)

    def __getitem__(self, index: int) -> Any:
        return self._read(index)


def plant(run: Run, fault: str) -> None:
    """Plant a fault in a run on this rank."""
    groups = run.groups
    if fault == "rank" and run.world.rank == 1:
        for stage in run.stages.values():
            stage.register_forward_pre_hook(lambda module, args: time.sleep(0.15))
    elif fault == "link" and groups.index("dp") == 0:
        run_call = METER.run

        def run_slowly(kind: str, group: Any, sent: float, call: Callable[[], Any]) -> Any:
            return run_call(kind, group, sent, slower(call, 0.05) if group is groups.group("tp") else call)

        METER.run = run_slowly  # type: ignore[method-assign]
    elif fault == "messages":
        receive = run.p2p.receive

        def receive_slowly(*args: Any) -> tuple[torch.Tensor, Any]:
            tensor, handle = receive(*args)
            return tensor, _Late(handle)

        run.p2p.receive = receive_slowly  # type: ignore[method-assign]
    elif fault == "reading":
        run.train_loader.dataset = SlowReading(run.train_loader.dataset)
    elif fault == "disk":
        run.saver.try_to_save = slower(run.saver.try_to_save, 0.15)  # type: ignore[method-assign]
    elif fault == "router":
        for stage in run.stages.values():
            for module in stage.modules():
                if isinstance(module, TopKRouter):
                    favoured = module.weight[0].detach().clone()
                    module.register_forward_pre_hook(_Favour(favoured / favoured.square().sum()))


class _Late:
    """The handle of a slow message."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def wait(self) -> None:
        time.sleep(0.06)
        self._handle.wait()


class _Favour:
    """Adds a direction to a router's input, so that one expert's logit is larger by 1."""

    def __init__(self, direction: torch.Tensor) -> None:
        self._direction = direction

    def __call__(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (args[0] + self._direction, *args[1:])


def _train(folder: str, fault: str, settings: dict[str, Any]) -> None:
    run = tiny_run(**settings, save=folder)
    plant(run, fault)
    sinks = [JsonLinesSink(Path(folder) / "metrics.jsonl")] if run.world.rank == 0 else []
    train(run, sinks)


def diagnosed(planted: Bottleneck, folder: Path, steps: int = 12) -> Diagnosis:
    """Run it in ``folder`` and diagnose its records."""
    run_ranks(planted.ranks, _train, str(folder), planted.fault, BASE | {"train_iters": steps} | planted.settings)
    return diagnose(RunSummary.of(read_run(folder)))


def recommended(planted: Bottleneck, found: Diagnosis) -> Bottleneck:
    """The run with the first recommendation for the first cause applied."""
    changes = found.findings[0].changes
    settings = dict(changes[0].settings) if changes else {}
    fault = planted.fault if settings else ""
    return Bottleneck(planted.cause, planted.settings | settings, fault, planted.ranks)


def tokens_per_second(folder: Path) -> float:
    """Tokens per second in the second half of a run's steps, including the time between steps."""
    records = read_run(folder)
    last = records.steps()[-1]
    tokens = last["global_batch_size"] * records.header(0)["config"]["seq_length"]
    times = [line["seconds"] for line in records.ranks[0] if line["kind"] == "times" and line["first"] <= line["last"]]
    half = times[len(times) // 2 :]
    return tokens * len(half) / sum(half)


@dataclass(frozen=True)
class Outcome:
    """The result for a planted bottleneck."""

    name: str
    planted: Bottleneck
    diagnosis: Diagnosis
    speedup: float

    @property
    def named(self) -> bool:
        """Whether the first cause is the planted one."""
        return self.diagnosis.findings[0].cause == self.planted.cause

    def row(self) -> str:
        """A line of the table."""
        first = self.diagnosis.findings[0]
        change = first.changes[0].text if first.changes else "none"
        cause = first.cause if self.named else f"**{first.cause}**"
        gain = first.changes[0].gain if first.changes else 0.0
        predicted = f"{1 / (1 - gain):.2f}" if gain else "-"
        return f"| {self.name} | {cause} ({first.share:.0%}) | {change} | {predicted} | {self.speedup:.2f} |"


def examine(name: str, repeats: int, steps: int) -> Outcome:
    """Diagnose, apply the recommendation, and compare, ``repeats`` times alternately; the fastest runs count."""
    planted = BOTTLENECKS[name]
    rates: tuple[list[float], list[float]] = ([], [])
    with tempfile.TemporaryDirectory() as place:
        folders = [Path(place, f"{kind}{at}") for at in range(repeats) for kind in ("before", "after")]
        first = diagnosed(planted, folders[0], steps)
        after = recommended(planted, first)
        for number, folder in enumerate(folders):
            if number:
                diagnosed((planted, after)[number % 2], folder, steps)
            rates[number % 2].append(tokens_per_second(folder))
    return Outcome(name, planted, first, max(rates[1]) / max(rates[0]))


INTRODUCTION = """Written by `make verify-all` (`python -m tests.reports.bottlenecks`). Each run is diagnosed from its
records, then its first recommendation is applied: the settings it names, or the planted fault is removed where it asks
for other hardware. Speedups are tokens/s after the change over tokens/s before it. The fastest of several runs of each
counts; other programs on the machine change ratios near 1.
"""
HEAD = "| planted | named first (share) | first recommendation | predicted speedup | speedup |\n|---|---|---|---|---|"


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine all bottlenecks; returns 1 if more than one is not found, or if more than a fifth of the advice does not
    help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=list(BOTTLENECKS), choices=BOTTLENECKS, metavar="NAME")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    settings = parser.parse_args(arguments)
    found = []
    for name in settings.only:
        found.append(examine(name, settings.repeats, settings.steps))
        print(found[-1].row(), flush=True)
    named, faster = sum(each.named for each in found), sum(each.speedup > 1.0 for each in found)
    total = f"The planted cause is named first in {named} of {len(found)}; the advice makes {faster} of them faster."
    print(total)
    if settings.markdown is not None:
        text = "\n".join(
            ["# Bottlenecks planted in real runs\n", INTRODUCTION, HEAD, *(each.row() for each in found), "", total, ""]
        )
        settings.markdown.write_text(text, encoding="utf-8")
    return int(named < len(found) - 1 or faster < 0.8 * len(found))


if __name__ == "__main__":
    sys.exit(main())
