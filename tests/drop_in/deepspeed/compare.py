"""Train small models with ``deepspeed``, the real one or the drop-in, and compare the results.

``results(library, jobs)`` starts one process that imports the library, and forks the ranks of each job from it, because
importing the real one takes several seconds. As a program: ``python compare.py FOLDER`` runs the jobs of
``FOLDER/jobs.json`` and writes ``FOLDER/NAME.RANK.json``.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

ROOT = Path(__file__).parents[3]
REFERENCE = Path(sys.prefix).resolve() / "reference"
"""DeepSpeed itself, if it is installed for comparison."""
Library = Literal["reference", "drop-in"]
PATHS: dict[Library, list[Path]] = {"reference": [REFERENCE], "drop-in": [ROOT / "megatron_core" / "drop_in", ROOT]}
SECONDS = 240.0
"""Time limit of a process."""


@dataclass(frozen=True)
class Job:
    """A model, a configuration and a number of ranks."""

    name: str
    config: dict[str, Any]
    ranks: int = 1
    micro_steps: int = 40
    program: str = "plain"
    """``plain``: optimizer and scheduler of the JSON; ``client``: of torch, from the program."""


@dataclass
class Result:
    """Values on rank 0 after each micro-batch."""

    losses: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    """Results of ``backward``."""
    norms: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    counters: list[list[int]] = field(default_factory=list)
    """global_steps, micro_steps, global_samples, skipped_steps, whether the next micro-batch is a boundary."""
    weights: list[float] = field(default_factory=list)
    """Sum of squares of each trained parameter, at the end."""


class Small(nn.Module):
    """Embedding, residual layers, a frozen layer, a weight used twice, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8)) for _ in range(3)
        )
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.head = nn.Linear(8, 16)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        hidden = self.frozen(self.embedding(tokens))
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def samples(count: int = 64) -> torch.utils.data.Dataset[Any]:
    """The same samples on all ranks."""
    tokens = torch.randint(0, 16, (count, 6), generator=torch.Generator().manual_seed(0))
    return torch.utils.data.TensorDataset(tokens, (tokens * 3 + 1) % 16)


def train(job: Job) -> Result:
    """Train on this rank."""
    import deepspeed

    torch.manual_seed(0)
    model = Small()
    given: dict[str, Any] = {}
    if job.program == "client":
        decayed = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
        others = [p for p in model.parameters() if p.dim() == 1 and p.requires_grad]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "lr": 0.02, "weight_decay": 0.0}]
        given["optimizer"] = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))
        given["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(given["optimizer"], 3, gamma=0.5)
    found = deepspeed.initialize(model=model, config=job.config, training_data=samples(), **given)
    engine, _, loader, _ = found
    batches, result = iter(deepspeed.utils.RepeatingLoader(loader)), Result()
    for _ in range(job.micro_steps):
        loss = engine(*next(batches))
        result.returned.append(float(engine.backward(loss)))
        result.losses.append(float(loss))
        engine.step()
        result.norms.append(float(engine.get_global_grad_norm() or 0.0))
        result.rates.append([float(rate) for rate in engine.get_lr()])
        counters = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
        result.counters.append([*counters, int(engine.is_gradient_accumulation_boundary())])
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    with deepspeed.zero.GatheredParameters(trained):
        result.weights = [float(p.detach().double().square().sum()) for p in trained]
    return result


def results(library: Library, jobs: list[Job]) -> dict[str, Result]:
    """Run ``jobs`` with ``library`` in a process of its own; return the results of rank 0 by name."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "jobs.json").write_text(json.dumps([asdict(job) for job in jobs]))
        environment = {
            **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")},
            "PYTHONPATH": os.pathsep.join(map(str, PATHS[library])),
            "DS_ACCELERATOR": "cpu",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, __file__, str(folder)]
        found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=SECONDS, cwd=folder)
        assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
        return {job.name: Result(**json.loads((folder / f"{job.name}.0.json").read_text())) for job in jobs}


def _run_rank(job: Job, rank: int, port: int, folder: Path) -> None:
    """Train on one rank and end the process."""
    values = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job.ranks, "LOCAL_WORLD_SIZE": job.ranks}
    os.environ.update({name: str(value) for name, value in values.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    code = 1
    try:
        (folder / f"{job.name}.{rank}.json").write_text(json.dumps(asdict(train(job))))
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(folder: Path) -> None:
    """Run all jobs of a folder, one after the other."""
    import deepspeed  # before the forks
    import deepspeed.utils

    torch.set_num_threads(1)
    compiled = getattr(deepspeed.ops, "__compatible_ops__", {})
    compiled.update(dict.fromkeys(compiled, False))  # nothing is compiled: sums go through gloo
    for job in (Job(**each) for each in json.loads((folder / "jobs.json").read_text())):
        began, port, children = time.perf_counter(), _free_port(), []
        for rank in range(job.ranks):
            child = os.fork()
            if child == 0:
                _run_rank(job, rank, port, folder)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(f"{job.name}: {time.perf_counter() - began:.1f} s, exit codes {codes}", file=sys.stderr)
        if any(codes):
            sys.exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
