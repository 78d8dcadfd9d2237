"""A chain of small stages in float64; every plan must compute the result of one process."""

from __future__ import annotations

import random
import time

import torch
from torch import Tensor, nn

from megatron_core.features.paired_passes.interleave import hand_over
from megatron_core.pipeline_parallel.executor import Executor, Listener
from megatron_core.pipeline_parallel.messages import MessageFormat
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.schedules.actions import Plan
from megatron_core.tensor_parallel.linear import parallel_linear

WIDTH = 4
MESSAGE = MessageFormat((3, WIDTH), torch.float64, torch.device("cpu"))


def rows(micro: int) -> int:
    """Micro-batches have different lengths."""
    return 2 + micro % 3


def ragged(num_microbatches: int) -> MessageFormat:
    """The messages of micro-batches of different lengths."""
    lengths = {micro: rows(micro) for micro in range(num_microbatches)}
    return MessageFormat(MESSAGE.shape, MESSAGE.dtype, MESSAGE.device, lengths)


def _random(name: int, number: int, *shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * name + number))


class _HandOver(torch.autograd.Function):
    """The identity; hands over to the other action of a pair in forward and in backward."""

    @staticmethod
    def forward(ctx, x):
        hand_over()
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        hand_over()
        return grad


class Chain:
    """y = tanh((x W_s) W_s + b_s) on each stage s; each micro-batch has its own first x and last target.

    The weight is used twice, and the bias is not part of a parallel layer, so a split backward must sum both gradients
    of the weight and must not lose the bias's.
    """

    def __init__(self, plan: Plan, rank: int | None = None, shake: random.Random | None = None) -> None:
        self.plan, self.shake = plan, shake
        mine = [stage for stage, holder in enumerate(plan.stage_to_rank) if rank in (None, holder)]
        self.weights = {stage: nn.Parameter(_random(0, stage, WIDTH, WIDTH)) for stage in mine}
        self.biases = {stage: nn.Parameter(_random(3, stage, WIDTH)) for stage in mine}

    @property
    def parameters(self) -> list[nn.Parameter]:
        """All stages on this rank."""
        return [*self.weights.values(), *self.biases.values()]

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        """A stage; a scalar on the last one."""
        if self.shake is not None:  # so that ranks are not synchronous
            time.sleep(self.shake.random() * 1e-3)
        x = _random(1, micro, rows(micro), WIDTH) if x is None else x
        once = _HandOver.apply(parallel_linear(x, self.weights[stage], None))
        y = torch.tanh(parallel_linear(once, self.weights[stage], None) + self.biases[stage])
        last = stage == self.plan.num_stages - 1
        return (y * _random(2, micro, rows(micro), WIDTH)).sum() if last else y

    def reference(self) -> dict[int, Tensor]:
        """Losses by micro-batch, in one process; afterwards the parameters have their gradients."""
        losses = {}
        for micro in range(self.plan.num_microbatches):
            x = None
            for stage in range(self.plan.num_stages):
                x = self.forward(stage, micro, x)
            x.backward()
            losses[micro] = x.detach()
        return losses


def run_chain(
    plan: Plan,
    p2p: PipelineP2P,
    *,
    overlap: bool = True,
    listener: Listener | None = None,
    seed: int = 0,
    message: MessageFormat | None = None,
) -> tuple[dict[int, Tensor], Chain]:
    """Run a plan on this rank; returns its losses, and its part of the chain with gradients."""
    chain = Chain(plan, p2p.index, shake=random.Random(1000 * seed + p2p.index))
    executor = Executor(
        plan,
        p2p,
        message or ragged(plan.num_microbatches),
        chain.forward,
        parameters=chain.parameters,
        overlap=overlap,
        listener=listener or Listener(),
    )
    return executor.run(), chain
