"""A small model, and its training with ``deepspeed``: the real one, or the drop-in."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.drop_in.deepspeed import SHARDS


@dataclass(frozen=True)
class Job:
    """A model, a configuration and a number of ranks."""

    name: str
    config: dict[str, Any]
    ranks: int = 1
    micro_steps: int = 40
    program: str = "plain"
    """``plain``: optimizer and scheduler of the JSON; ``client``: of torch, from the program."""
    overflows: tuple[int, ...] = ()
    """Micro-batches whose loss is multiplied by infinity."""


@dataclass
class Result:
    """Values on rank 0 after each micro-batch."""

    losses: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    """Results of ``backward``."""
    norms: list[float] = field(default_factory=list)
    rates: list[list[float]] = field(default_factory=list)
    momenta: list[Any] = field(default_factory=list)
    """Betas or momentum of each parameter group."""
    scales: list[float] = field(default_factory=list)
    """Loss scales; 1 without fp16."""
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


def describe_ranks() -> None:
    """Describe the ranks of torch.distributed to DeepSpeed, as a launcher does."""
    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "DS_ACCELERATOR": "cpu"}


def train(values: dict[str, Any]) -> dict[str, Any]:
    """Train the ``Job`` of ``values`` on this rank; return the fields of ``Result``."""
    import deepspeed

    job = Job(**values)
    describe_ranks()
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
    for number in range(job.micro_steps):
        loss = engine(*next(batches))
        if number in job.overflows:
            loss = loss * float("inf")
        result.returned.append(engine.backward(loss).item())
        result.losses.append(loss.item())
        engine.step()
        result.norms.append(float(engine.get_global_grad_norm() or 0.0))
        result.rates.append([float(rate) for rate in engine.get_lr()])
        result.momenta.append(engine.get_mom())
        result.scales.append(float(getattr(engine.optimizer, "cur_scale", 1.0)))
        counters = engine.global_steps, engine.micro_steps, engine.global_samples, engine.skipped_steps
        result.counters.append([*counters, int(engine.is_gradient_accumulation_boundary())])
    trained = [p for p in engine.module.parameters() if p.requires_grad]
    with deepspeed.zero.GatheredParameters(trained):
        result.weights = [float(p.detach().double().square().sum()) for p in trained]
    return asdict(result)


def coalesce(stage: int) -> list[float]:
    """Losses of four steps, each of three backwards whose gradients are summed over the ranks at once; norms."""
    import deepspeed

    describe_ranks()
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, **SHARDS},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    engine, _, loader, _ = deepspeed.initialize(model=Small(), config=config, training_data=samples())
    batches = iter(loader)
    found: list[float] = []
    for _ in range(4):
        with engine.coalesce_grad_reduction():
            for _ in range(3):
                loss = engine(*next(batches))
                engine.backward(loss)
                found.append(loss.item())
        engine.step()
        found.append(float(engine.get_global_grad_norm()))
    return found
