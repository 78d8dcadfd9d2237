"""Stages that sleep for known times, to measure only the order and the overlap of work."""

from __future__ import annotations

import time
from collections.abc import Collection
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.pipeline_parallel.executor import Executor, Listener
from megatron_core.pipeline_parallel.messages import MessageFormat
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.planner.simulate import Timeline
from megatron_core.reports.trace_files import Recording, TraceWriter
from megatron_core.schedules.actions import Action, Plan
from megatron_core.tensor_parallel.linear import defers_weight_grad

MESSAGE = MessageFormat((1,), torch.float32, torch.device("cpu"))


class Sleep(torch.autograd.Function):
    """Sleeps ``seconds`` for F, for I and for W, which it defers like ``tensor_parallel.linear``."""

    @staticmethod
    def forward(ctx, x, weight, seconds):
        time.sleep(seconds)
        ctx.weight, ctx.seconds = weight, seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        if not defers_weight_grad(ctx.weight, lambda: time.sleep(ctx.seconds)):
            time.sleep(ctx.seconds)
        return grad, None, None


def trace_sleeps(folder: Path, plans: dict[str, Plan], seconds: float, steps: int) -> None:
    """Run each plan on this rank for some steps; the traces of each plan are in a folder of its name.

    F, I and W of a stage take ``seconds`` each.
    """
    groups = ParallelGroups(Grid(pp=dist.get_world_size()), dist.get_rank())
    p2p = PipelineP2P(groups)
    for name, plan in plans.items():
        writer = TraceWriter(folder / name, groups.rank, groups.ranks("pp"), name, plan.stage_to_rank)
        for step in range(1, steps + 1):
            dist.barrier()
            recording = Recording(time.monotonic)
            _run(plan, p2p, seconds, recording)
            writer.write(step, recording)


def _run(plan: Plan, p2p: PipelineP2P, seconds: float, recording: Recording) -> None:
    weight = nn.Parameter(torch.zeros(1))

    def forward(stage: int, micro: int, x: Tensor | None) -> Tensor:
        y = Sleep.apply(torch.ones(1) if x is None else x, weight, seconds)
        return y.sum() if stage == plan.num_stages - 1 else y

    listener = Listener(on_begin=recording.begin, on_end=recording.end)
    Executor(plan, p2p, MESSAGE, forward, parameters=[weight], listener=listener).run()


def undisturbed(timelines: Collection[Timeline]) -> Timeline:
    """Combine several measured steps: the minimum of each action's duration and delay over all steps.

    The delay is the time between the moment when a rank could start the action (the previous one has ended and its
    dependencies are available) and its start. Other processes on the machine delay an action in some steps; an executor
    that waits unnecessarily delays it in every step.
    """
    plan = next(iter(timelines)).plan
    before = {action: earlier for actions in plan.ranks for earlier, action in pairwise(actions)}
    start: dict[Action, float] = {}
    end: dict[Action, float] = {}
    for action in (action for _, turn in plan.walk() for action in turn):
        needs = [need for need in (before.get(action), *plan.needs(action)) if need is not None]
        possible = [max((t.end[need] for need in needs), default=0.0) for t in timelines]
        delay = min(t.start[action] - soonest for t, soonest in zip(timelines, possible, strict=True))
        start[action] = max((end[need] for need in needs), default=0.0) + delay
        end[action] = start[action] + min(t.end[action] - t.start[action] for t in timelines)
    return Timeline(plan, start, end)
