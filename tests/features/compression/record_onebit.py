"""Records weights of DeepSpeed's 1-bit optimizers on two ranks, for test_onebit_deepspeed.py.

DeepSpeed removed them after 0.16; its compressed all-reduce needs cupy. So this program runs the optimizer classes of
DeepSpeed 0.16.9 in float64, with a backend that does the same all-reduce with torch.distributed and gloo:

DS_ACCELERATOR=cpu PYTHONPATH=.:FOLDER_OF_DEEPSPEED_0.16.9 python -m tests.features.compression.record_onebit
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_core.verify.ranks import run_ranks
from tests.features.compression.test_onebit_deepspeed import CASES, SHAPES, STEPS, gradient, rate, start

FILE = Path(__file__).with_name("onebit_reference.json")
CLASSES = {"onebit-adam": ("adam", "OnebitAdam"), "onebit-lamb": ("lamb", "OnebitLamb")}
CLASSES["zero-one-adam"] = ("zoadam", "ZeroOneAdam")


class Backend:
    """The compressed all-reduce of deepspeed.runtime.comm.nccl, for any dtype."""

    def __init__(self, mpu: object = None) -> None:
        self.size, self.rank = dist.get_world_size(), dist.get_rank()

    def compressed_allreduce(self, buffer: Tensor, worker_error: Tensor, server_error: Tensor, rank: int) -> Tensor:
        """The mean of ``buffer`` over the ranks, with two errors."""
        message = buffer.flatten() + worker_error
        sent = _signs(message)
        worker_error.copy_(message - sent)
        shares = [torch.empty_like(sent) for _ in range(self.size)]
        dist.all_gather(shares, sent)
        share = (sum(shares) / self.size).chunk(self.size)[self.rank] + server_error
        answer = _signs(share)
        server_error.copy_(share - answer)
        answers = [torch.empty_like(answer) for _ in range(self.size)]
        dist.all_gather(answers, answer)
        buffer.copy_(torch.cat(answers).view_as(buffer))
        return buffer


def _signs(x: Tensor) -> Tensor:
    return torch.where(x >= 0, 1.0, -1.0).to(x) * torch.linalg.vector_norm(x) / x.numel() ** 0.5


def _trained(method: str, params: dict[str, Any]) -> list[list[float]]:
    torch.set_default_dtype(torch.float64)
    sys.modules["deepspeed.runtime.comm.nccl"] = ModuleType("nccl")
    sys.modules["deepspeed.runtime.comm.nccl"].NcclBackend = Backend  # type: ignore[attr-defined]
    module = importlib.import_module(f"deepspeed.runtime.fp16.onebit.{CLASSES[method][0]}")
    engine = SimpleNamespace(mpu=None, local_rank=0, enable_backward_allreduce=True)
    module.dist = SimpleNamespace(is_initialized=lambda: True, get_rank=dist.get_rank)
    weights = [nn.Parameter(start(name)) for name in SHAPES]
    optimizer = getattr(module, CLASSES[method][1])(weights, engine, **params)
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()  # initializes, and updates nothing
    for weight in weights:
        optimizer.state[weight]["step"] = 0
    for step in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rate(step)
        for name, weight in zip(SHAPES, weights, strict=True):
            weight.grad = gradient(name, step, dist.get_rank())
            if engine.enable_backward_allreduce:
                dist.all_reduce(weight.grad)
                weight.grad /= dist.get_world_size()
        optimizer.step()
    return [weight.detach().flatten().tolist() for weight in weights]


def main() -> None:
    """Write the file."""
    found = {}
    for name, (method, params, _) in CASES.items():
        ranks = run_ranks(2, _trained, method, params)
        difference = max(abs(a - b) for one, two in zip(*ranks, strict=True) for a, b in zip(one, two, strict=True))
        assert difference < 1e-12, "the last step synchronizes"
        found[name] = dict(zip(SHAPES, ranks[0], strict=True))
    FILE.write_text(json.dumps({"source": "DeepSpeed 0.16.9, see record_onebit.py", "weights": found}) + "\n")


if __name__ == "__main__":
    main()
