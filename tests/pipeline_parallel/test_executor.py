"""A chain of small stages in float64: the executor computes what one process computes, whatever the plan."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.pipeline_parallel.actions import Action, Plan, placed_round_robin
from megatron_core.pipeline_parallel.checks import check
from megatron_core.pipeline_parallel.executor import Executor, MessageFormat
from megatron_core.pipeline_parallel.p2p import Links
from megatron_core.pipeline_parallel.schedules import forward_only, interleaved
from megatron_core.verify.ranks import run_ranks

ROWS, WIDTH = 3, 4
MESSAGE = MessageFormat((ROWS, WIDTH), torch.float64, torch.device("cpu"))


def _random(name: int, number: int) -> Tensor:
    shape = (WIDTH, WIDTH) if name == 0 else (ROWS, WIDTH)
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * name + number))


@dataclass
class Chain:
    """y = tanh(x W_s) on each stage s, from a micro-batch's own data; the last one's loss is <y, target>."""

    num_stages: int
    weights: dict[int, Tensor] = field(default_factory=dict)
    shake: random.Random | None = None

    def forward(self, stage: int, micro: int, x: Tensor | None) -> Tensor:
        if self.shake is not None:  # ranks that are not in step with one another
            time.sleep(self.shake.random() * 1e-3)
        weight = self.weights.setdefault(stage, _random(0, stage).requires_grad_())
        y = torch.tanh((_random(1, micro) if x is None else x) @ weight)
        return (y * _random(2, micro)).sum() if stage == self.num_stages - 1 else y

    def reference(self, num_microbatches: int) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
        """Losses by micro-batch and weight gradients by stage, in one process."""
        losses = {}
        for micro in range(num_microbatches):
            x = None
            for stage in range(self.num_stages):
                x = self.forward(stage, micro, x)
            x.backward()
            losses[micro] = x.detach()
        return losses, {stage: weight.grad for stage, weight in self.weights.items()}


def _run(plan: Plan, num_microbatches: int, links: Links, seed: int) -> None:
    """Run a plan on this rank and compare with one process."""
    losses, grads = Chain(plan.num_stages).reference(num_microbatches)
    chain = Chain(plan.num_stages, shake=random.Random(1000 * seed + links.index))
    finished: list[int] = []

    def on_last_backward(stage: int) -> None:
        finished.append(stage)
        executor_saw[stage] = None if chain.weights[stage].grad is None else chain.weights[stage].grad.clone()

    executor_saw: dict[int, Tensor | None] = {}
    found = Executor(plan, links, MESSAGE, chain.forward, on_last_backward=on_last_backward).run()
    mine = [stage for stage, rank in enumerate(plan.place) if rank == links.index]
    assert found.keys() == (losses.keys() if plan.num_stages - 1 in mine else set())
    for micro, loss in found.items():
        torch.testing.assert_close(loss, losses[micro], rtol=1e-12, atol=1e-12)
    assert sorted(chain.weights) == mine
    for stage in mine:
        torch.testing.assert_close(chain.weights[stage].grad, grads[stage], rtol=1e-12, atol=1e-12)
    assert sorted(finished) == mine, "the last backward of a stage is announced once"
    if num_microbatches > 1:  # and before it has run
        assert not any(torch.equal(executor_saw[stage], chain.weights[stage].grad) for stage in mine)
    else:
        assert set(executor_saw.values()) == {None}


def _check_schedules(num_ranks: int) -> None:
    links = Links(ParallelGroups(Grid(pp=num_ranks), dist.get_rank()))
    for chunks in (1, 2, 3):
        for micros in (1, 2, 3, 4, 5):
            _run(interleaved(num_ranks, chunks, micros), micros, links, seed=10 * chunks + micros)
    for seed in range(6):
        plan = random_plan(num_ranks, 2, 4, seed)
        _run(check(plan, 4), 4, links, seed)
    _check_evaluation(links, num_ranks)


def random_plan(num_ranks: int, num_chunks: int, num_microbatches: int, seed: int) -> Plan:
    """Any order that respects the dependencies, and keeps the micro-batches of a stage in its neighbour's order."""
    choice = random.Random(seed)
    place = placed_round_robin(num_ranks, num_chunks)
    plan = Plan(((),) * num_ranks, place)
    left = {Action(s, k, m) for s in range(len(place)) for k in "FB" for m in range(num_microbatches)}
    done: set[Action] = set()
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    while left:
        ready = [a for a in sorted(left) if set(plan.needs(a)) <= done and _is_next(plan, a, ranks)]
        action = choice.choice(ready)
        left.remove(action)
        done.add(action)
        ranks[place[action.stage]].append(action)
    return Plan(tuple(map(tuple, ranks)), place)


def _is_next(plan: Plan, action: Action, ranks: list[list[Action]]) -> bool:
    """Whether an action takes the first message of its stream that has not been taken yet."""
    source = plan.source(action)
    if source is None or plan.place[source.stage] == plan.place[action.stage]:
        return True
    stream = [a for a in ranks[plan.place[source.stage]] if (a.stage, a.kind) == (source.stage, source.kind)]
    taken = {
        plan.source(a) for a in ranks[plan.place[action.stage]] if (a.stage, a.kind) == (action.stage, action.kind)
    }
    return next(sent for sent in stream if sent not in taken) == source


def _check_evaluation(links: Links, num_ranks: int) -> None:
    """Forwards alone keep no graph and touch no gradient."""
    plan = check(forward_only(num_ranks, 2, 3), 3, forward_only=True)
    chain = Chain(plan.num_stages)
    expected, _ = Chain(plan.num_stages).reference(3)
    found = Executor(plan, links, MESSAGE, chain.forward).run()
    assert all(not loss.requires_grad for loss in found.values())
    assert all(weight.grad is None for weight in chain.weights.values())
    for micro, loss in found.items():
        torch.testing.assert_close(loss, expected[micro], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_executor_computes_what_one_process_computes(num_ranks: int) -> None:  # C1 C2 C32 C65
    """1F1B and interleaved plans with 1 to 3 chunks and 1 to 5 micro-batches, and plans in any sound order."""
    run_ranks(num_ranks, _check_schedules, num_ranks)


def test_one_rank_with_several_chunks() -> None:
    """Outputs go from stage to stage without a message."""
    links = Links(ParallelGroups.single())
    for chunks in (1, 2, 3):
        _run(interleaved(1, chunks, 3), 3, links, seed=chunks)
