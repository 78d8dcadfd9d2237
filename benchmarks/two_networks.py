"""Measure good and bad placements of a layout on two hosts with a slow link, and compare them with the planner.

python -m benchmarks.two_networks

Needs root and Linux (benchmarks/two_hosts.py). Each host has two ranks, which share memory; gloo joins the hosts, over
a link of --bandwidth and --latency. First `megatron-diagnose --machine` and `--links` measure the machine; the planner
gets it with the link's true bandwidth and latency. Then each layout is trained with its groups within hosts, which is
the default, and with them between hosts (--rank-order); the median time of its steps is compared with the planner's.
Appends to benchmarks/results.csv; ratio is predicted / measured, and for the link measured / true.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tyro

from benchmarks.results import Row, append
from benchmarks.two_hosts import ADDRESSES, on_host, two_hosts
from megatron_core.config import RunConfig
from megatron_core.planner.cost import step_cost
from megatron_core.planner.explain import flag_of
from megatron_core.planner.hardware import Hardware, Link, read_hardware
from megatron_core.planner.layout_settings import describe_layout
from megatron_core.planner.search import Search

ROOT = Path(__file__).parents[1]
RANKS = 2
"""Ranks of a host."""
MODEL: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "seq_length": 64,
    "vocab_size": 512,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "micro_batch_size": 4,
    "global_batch_size": 16,
    "eval_iters": 0,
    "log_interval": 1,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 128}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "tp2 dp2, tp within hosts": {"tensor_model_parallel_size": 2},
    "tp2 dp2, tp between hosts": {"tensor_model_parallel_size": 2, "rank_order": "dp-cp-ep-tp-pp"},
    "tp2 pp2, tp within hosts": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "tp2 pp2, tp between hosts": {
        "tensor_model_parallel_size": 2,
        "pipeline_model_parallel_size": 2,
        "rank_order": "pp-cp-ep-dp-tp",
    },
    "cp2 dp2, cp within hosts": {"context_parallel_size": 2},
    "cp2 dp2, cp between hosts": {"context_parallel_size": 2, "rank_order": "tp-dp-ep-cp-pp"},
    "dp4 ep2, ep within hosts": EXPERTS | {"expert_model_parallel_size": 2},
    "dp4 ep2, ep between hosts": EXPERTS | {"expert_model_parallel_size": 2, "rank_order": "tp-cp-dp-ep-pp"},
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Train on two hosts with a slow link between them."""

    bandwidth: float = 1.25e6
    """Bytes per second of the link in each direction."""
    latency: float = 1e-3
    """Seconds of the link."""
    steps: int = 10
    """Timed steps, after two others."""
    only: str = ""
    """Part of the names of the placements that are measured; default: all."""


def start(hosts: Sequence[str], words: Sequence[str], folder: Path) -> str:
    """Run a program on all ranks of both hosts; its output on the first one."""
    launchers = []
    for number, name in enumerate(hosts):
        rendezvous = f"--nnodes 2 --node-rank {number} --master-addr {ADDRESSES[0]} --master-port 29500".split()
        launcher = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), *rendezvous)
        environment = os.environ | {"GLOO_SOCKET_IFNAME": name, "OMP_NUM_THREADS": "1"}
        with (folder / f"host{number}.log").open("w") as log:
            command = on_host(name, [*launcher, *words])
            launchers.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log))
    statuses = [launcher.wait(600) for launcher in launchers]
    output = (folder / "host0.log").read_text()
    if any(statuses):
        sys.exit(f"{' '.join(words)} ended with {statuses}:\n{output[-4000:]}")
    return output


def measured_machine(hosts: Sequence[str], folder: Path) -> Hardware:
    """This machine with all its ranks at work, and the links of both hosts."""
    alone, joined = folder / "machine.json", folder / "hosts.json"
    tool = ("-m", "megatron_core.commands.diagnose")
    words = ("--machine", "--quick", "--ranks", str(2 * RANKS), "--output", str(alone))
    subprocess.run([sys.executable, *tool, *words], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    print(start(hosts, [*tool, "--links", "--hardware", str(alone), "--output", str(joined)], folder), end="")
    return read_hardware(str(joined))


def train(hosts: Sequence[str], settings: dict[str, Any], steps: int, folder: Path) -> tuple[float, str]:
    """Median seconds of a step, and the run's output."""
    metrics = folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)
    flags = [word for name, value in settings.items() for word in flag_of(name, value)]
    output = start(
        hosts, ["pretrain_gpt.py", *flags, "--train-iters", str(steps + 2), "--metrics-file", str(metrics)], folder
    )
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    seconds = [record["elapsed_ms"] / 1000 for record in records if "elapsed_ms" in record and record["iteration"] > 2]
    return statistics.median(seconds), output


def main() -> None:
    """Measure, compare, append."""
    settings = tyro.cli(Settings, description=__doc__)
    folder = Path(tempfile.mkdtemp(prefix="two_networks_"))
    link = Link(bandwidth=settings.bandwidth / RANKS, latency=settings.latency)
    with two_hosts(settings.bandwidth, settings.latency) as hosts:
        machine = measured_machine(hosts, folder)
        found = machine.inter.bandwidth
        print(f"a rank's part of the link: {found:.4g} B/s by --links, {link.bandwidth:.4g} B/s by its setting")
        append("two_networks", [Row("bandwidth by --links", found, "B/s", ratio=found / link.bandwidth)])
        machine = replace(machine, inter=link)
        for name, placement in PLACEMENTS.items():
            if settings.only not in name:
                continue
            config = RunConfig.from_flat(MODEL | placement | {"train_iters": 100})
            predicted = step_cost(config, 2 * RANKS, machine, MODEL["vocab_size"]).seconds
            measured, output = train(hosts, MODEL | placement, settings.steps, folder)
            is_reported = "spans 2 nodes" in " ".join(output.split())
            assert is_reported == ("tp between" in name), output[-4000:]
            print(
                f"{name:26} {measured:7.3f} s, predicted {predicted:7.3f} s, {predicted / measured - 1:+.0%}",
                flush=True,
            )
            row = Row(f"{name}, {settings.bandwidth / 1e6:g} MB/s", measured, "s", ratio=predicted / measured)
            append("two_networks", [row])
    best = Search(RunConfig.from_flat(MODEL | {"train_iters": 100}), 2 * RANKS, machine, MODEL["vocab_size"]).best(1)[0]
    print(f"the planner's choice: {describe_layout(best.config, 2 * RANKS)}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
