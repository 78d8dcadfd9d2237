"""Optimizer steps of other libraries, whose rule ``megatron_core.verify.UpdateWatch`` computes from measured tensors.

``late_rate``: Megatron-Bridge issue 5399. ``short_decay``: AReaL pull request 1289. ``decays_all``: verl issue 5070.
``scheduler_by_rank``: Accelerate advances a prepared schedule once for each rank.
``shard_norm``: FSDP2 ranks clip by the norms of their own shards. ``l2``: DeepSpeed's ``Adam`` without ``adam_w_mode``.
``default_clipping``: DeepSpeed clips to a norm of 1 without ``gradient_clipping`` in its configuration.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron_core.verify import AdamRule, UpdateWatch

STEPS = 5
WIDTH = 8


def small_model() -> nn.Module:
    """A model with matrices, biases and a norm."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)).double()


def batches(dtype: torch.dtype = torch.float64) -> Tensor:
    """The samples of each step, of different magnitudes, so that the norms of gradients differ."""
    torch.manual_seed(1)
    return torch.randn(STEPS, 4, WIDTH, dtype=dtype) * torch.arange(1, STEPS + 1).view(-1, 1, 1)


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Parameters of an optimizer: biases and norms have no weight decay."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    return [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]


def watched(
    model: nn.Module, rule: AdamRule, optimizer: torch.optim.Optimizer, advance: Callable[[], object] = lambda: None
) -> list[str]:
    """Train for some steps; ``advance`` is called after each."""
    watch = UpdateWatch(model, rule)
    for x in batches():
        optimizer.zero_grad()
        model(x).square().mean().backward()
        watch.before_step()
        optimizer.step()
        watch.after_step()
        advance()
    return watch.explain()


def decay(bug: str = "") -> list[str]:
    """torch's AdamW in a trainer that gives it all parameters, or groups."""
    model = small_model()
    parameters: Any = model.parameters() if bug == "decays_all" else decay_groups(model)
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.1)
    return watched(model, AdamRule([0.01] * STEPS, weight_decay=0.1), optimizer)


def megatron_schedule(bug: str, package: str) -> list[str]:
    """torch's AdamW with the schedule of Megatron Core in the folder ``package``: warm-up, then a cosine."""
    from benchmarks.megatron_peer import import_megatron

    import_megatron(Path(package))
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    def schedule(optimizer: torch.optim.Optimizer, decay_steps: int) -> Any:
        rates = {"init_lr": 0.0, "max_lr": 0.01, "min_lr": 0.0, "lr_warmup_steps": 2, "lr_decay_steps": decay_steps}
        decays = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1, "wd_incr_style": "constant"}
        return OptimizerParamScheduler(optimizer, **rates, **decays, lr_decay_style="cosine")

    def rates_of(decay_steps: int) -> list[float]:
        optimizer = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])
        scheduler = schedule(optimizer, decay_steps)
        rates = []
        for _ in range(STEPS + 2):
            scheduler.step(1)
            rates.append(optimizer.param_groups[0]["lr"])
        return rates

    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    scheduler = schedule(optimizer, 6 if bug == "short_decay" else 8)
    if bug != "late_rate":
        scheduler.step(1)  # Megatron's rate of step t is that of the schedule at t + 1
    return watched(model, AdamRule(rates_of(8)), optimizer, lambda: scheduler.step(1))


def accelerate_schedule(bug: str = "") -> list[str]:
    """A linear schedule under Accelerate, which a program prepares although its steps are counted on one rank."""
    from accelerate import Accelerator

    rank, size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # unused: the ranks have a process group
    accelerator = Accelerator(cpu=True)
    assert accelerator.num_processes == dist.get_world_size()
    rates = [0.01 * (1 - number / 20) for number in range(20)]
    model = small_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda number: 1 - number / 20)
    prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
    if bug == "scheduler_by_rank":
        scheduler = accelerator.prepare(scheduler)
    return watched(prepared_model, AdamRule(rates), prepared_optimizer, scheduler.step)


def clipping(bug: str = "") -> list[str]:
    """FSDP2 with gradients that are clipped by the whole norm, or by that of each rank's shards."""
    model = small_model()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    optimizer.register_step_pre_hook(lambda *_: _clip(model, bug))
    rule = AdamRule([0.01] * STEPS, max_norm=0.1, shards=dist.get_world_size())
    return watched(model, rule, optimizer)


def _clip(model: nn.Module, bug: str) -> None:
    if bug != "shard_norm":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        return
    gradients = [parameter.grad for parameter in model.parameters()]
    shards = [gradient.to_local() for gradient in gradients if isinstance(gradient, DTensor)]
    norm = torch.stack([shard.norm() for shard in shards]).norm()
    for shard in shards:
        shard.mul_((0.1 / (norm + 1e-6)).clamp(max=1.0))


def zero2(bug: str = "") -> list[str]:
    """DeepSpeed's ZeRO 2 with an Adam of its configuration."""
    rank, size = dist.get_rank(), dist.get_world_size()
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"DS_ACCELERATOR": "cpu"} | {name: str(value) for name, value in names.items()}
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad

    model = small_model().float()
    settings = {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True, "adam_w_mode": bug != "l2"}
    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "Adam", "params": settings}}
    config |= {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    if bug != "default_clipping":
        config["gradient_clipping"] = 0.0
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    rule = AdamRule([0.01] * STEPS, weight_decay=0.1, decays=lambda *_: True)
    watch = UpdateWatch(model, rule, gradient=safe_get_full_grad, weight=safe_get_full_fp32_param)
    for x in batches(torch.float32):
        engine.backward(engine(x).square().mean())
        watch.before_step()
        engine.step()
        watch.after_step()
    return watch.explain()
