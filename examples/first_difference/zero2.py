"""DeepSpeed: a step of ZeRO 2 with a public bug, compared with the same step of torch alone on one rank.

``manual_accumulation``: open-instruct pull request 1498; with ``gradient_accumulation_steps=1`` each ``backward`` ends
an accumulation, and ZeRO 2 keeps the gradients of the last one only. ``set_gradient_accumulation_boundary`` is the fix.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megatron_core.verify import compare

WIDTH, MICRO_BATCHES = 16, 2


def step(folder: str, bug: str = "") -> list[str]:
    """One step of two micro-batches, on several ranks under DeepSpeed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    engine = _engine(model, rank, size) if size > 1 else None
    watch = compare(model, folder, averaged=size, copy_weights=False, dp=(rank, size))
    torch.manual_seed(1)
    for number, whole in enumerate(torch.randn(MICRO_BATCHES, 8, WIDTH)):
        watch.micro_batch(number)
        loss = (engine or model)(whole.chunk(size)[rank]).square().mean()
        if engine is None:
            loss.backward()
            continue
        if bug != "manual_accumulation":
            engine.set_gradient_accumulation_boundary(number == MICRO_BATCHES - 1)
        engine.backward(loss)
    if engine is None:
        watch.gradients()
    else:
        from deepspeed.utils import safe_get_full_grad

        watch.gradients(safe_get_full_grad)
    return watch.finish()


def _engine(model: nn.Module, rank: int, size: int) -> Any:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    os.environ |= {"DS_ACCELERATOR": "cpu"} | {name: str(value) for name, value in names.items()}
    import deepspeed

    config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 8 // size, "zero_allow_untested_optimizer": True}
    config |= {"zero_optimization": {"stage": 2, "overlap_comm": False}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
