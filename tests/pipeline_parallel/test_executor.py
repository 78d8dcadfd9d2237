"""The executor computes what one process computes for any plan, timing and lengths of micro-batches."""

from __future__ import annotations

import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel import groups as groups_module
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.pipeline_parallel.executor import Executor, Listener
from megatron_core.pipeline_parallel.p2p import PipelineP2P
from megatron_core.schedules import SCHEDULES, forward_only, interleaved, make_plan, schedules
from megatron_core.schedules.actions import Action, Plan, round_robin_stages
from megatron_core.schedules.checks import check_plan
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.pipeline_parallel.chain import MESSAGE, WIDTH, Chain, ragged, run_chain
from tests.pipeline_parallel.one_queue import one_queue_for_each_group
from tests.sample import WHOLE_MATRIX

UNKNOWN = replace(MESSAGE, variable=True)
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


class Announcements(Listener):
    """Records the executor's calls about last gradients."""

    def __init__(self) -> None:
        super().__init__(on_last_backward=lambda s: self.said.append(s), on_last_weights=lambda s: self.said.append(s))
        object.__setattr__(self, "said", [])


def _run(plan: Plan, p2p: PipelineP2P, seed: int) -> None:
    """Run a plan on this rank, with and without overlap, lengths known and unknown; compare with one process."""
    whole = Chain(plan)
    losses = whole.reference()
    mine = [stage for stage, rank in enumerate(plan.stage_to_rank) if rank == p2p.index]
    grads = []
    for overlap, message in ((True, None), (False, None), (True, UNKNOWN)):
        told = Announcements()
        found, chain = run_chain(plan, p2p, overlap=overlap, listener=told, seed=seed, message=message)
        assert found.keys() == (losses.keys() if plan.num_stages - 1 in mine else set())
        for micro, loss in found.items():
            torch.testing.assert_close(loss, losses[micro], **CLOSE)
        for stage in mine:
            torch.testing.assert_close(chain.weights[stage].grad, whole.weights[stage].grad, **CLOSE)
            torch.testing.assert_close(chain.biases[stage].grad, whole.biases[stage].grad, **CLOSE)
        assert sorted(told.said) == mine, "the end of a stage's gradients is announced once"
        grads.append([parameter.grad for parameter in chain.parameters])
    for others in grads[1:]:
        assert all(torch.equal(a, b) for a, b in zip(grads[0], others, strict=True)), "the timing changes a bit"


def _plans(num_ranks: int) -> Iterator[Plan]:
    """Every schedule with 1 to 5 and more micro-batches, and plans in any valid order."""
    for name, schedule in SCHEDULES.items():
        if name == "forward_only":
            continue
        for chunks in (2, 3, 4) if schedule.chunks is None else (schedule.chunks,):
            yield from (make_plan(name, num_ranks, chunks, micros) for micros in (1, 2, 3, 5, 2 * num_ranks + 1))
    for name in schedules(in_pairs=True):
        chunks = SCHEDULES[name].chunks or 2
        yield from (make_plan(name, num_ranks, chunks, micros, paired=True) for micros in (3, 2 * num_ranks + 1))
    yield from (check_plan(random_plan(num_ranks, 2, 4, seed), 4) for seed in range(4))


def _check_plans(num_ranks: int) -> None:
    p2p = PipelineP2P(ParallelGroups(Grid(pp=num_ranks), dist.get_rank()))
    for seed, plan in enumerate(_plans(num_ranks)):
        _run(plan, p2p, seed)
    _check_evaluation(p2p, num_ranks)


def random_plan(num_ranks: int, num_chunks: int, num_microbatches: int, seed: int) -> Plan:
    """A random order that respects the dependencies, and in which neighbouring stages have the same order of
    micro-batches.

    Backwards are whole on even stages and split on odd ones.
    """
    choice = random.Random(seed)
    stage_to_rank = round_robin_stages(num_ranks, num_chunks)
    left = {
        Action(stage, kind, micro)
        for stage in range(len(stage_to_rank))
        for kind in ("FIW" if stage % 2 else "FB")
        for micro in range(num_microbatches)
    }
    plan = Plan((tuple(sorted(left)),), stage_to_rank)  # determines split backwards
    done: set[Action] = set()
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    while left:
        ready = [a for a in sorted(left) if set(plan.needs(a)) <= done and _is_next(plan, a, ranks)]
        action = choice.choice(ready)
        left.remove(action)
        done.add(action)
        ranks[stage_to_rank[action.stage]].append(action)
    return Plan(tuple(map(tuple, ranks)), stage_to_rank)


def _is_next(plan: Plan, action: Action, ranks: list[list[Action]]) -> bool:
    """Whether an action consumes the first unconsumed message of its stream."""
    source = plan.source(action)
    if plan.sender(action) is None:
        return True
    stream = [a for a in ranks[plan.sender(action)] if (a.stage, a.kind) == (source.stage, source.kind)]
    here = ranks[plan.stage_to_rank[action.stage]]
    taken = {plan.source(a) for a in here if (a.stage, a.kind) == (action.stage, action.kind)}
    return next(sent for sent in stream if sent not in taken) == source


def _check_evaluation(p2p: PipelineP2P, num_ranks: int) -> None:
    """Forwards without backwards store no graph and change no gradient."""
    plan = check_plan(forward_only(num_ranks, 2, 3), 3, forward_only=True)
    expected = Chain(plan).reference()
    found, chain = run_chain(plan, p2p)
    assert all(not loss.requires_grad for loss in found.values())
    assert all(parameter.grad is None for parameter in chain.parameters)
    for micro, loss in found.items():
        torch.testing.assert_close(loss, expected[micro], **CLOSE)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_executor_computes_what_one_process_computes(num_ranks: int) -> None:  # C1 C2 C32 C33 C40 C65
    """All schedules; weights used twice; micro-batches of different lengths; overlap on and off."""
    run_ranks(num_ranks, _check_plans, num_ranks)


@pytest.mark.parametrize(
    "plan",
    [
        interleaved(1, 3, 3),
        make_plan("zb_v", 1, 2, 3),
        make_plan("zb_h1", 1, 1, 2),
        make_plan("1f1b", 1, 1, 3, paired=True),
    ],
)
def test_one_rank_with_several_chunks(plan: Plan) -> None:
    """Outputs are passed between stages without messages."""
    _run(plan, PipelineP2P(ParallelGroups.single()), seed=1)


class Sent:
    """The handle of a message that is complete immediately."""

    def wait(self) -> None:
        """Return immediately."""

    def is_completed(self) -> bool:
        """Always complete."""
        return True


class FirstRank:
    """The messages of the first of two pipeline ranks; its partner is simulated."""

    index = 0
    has_run = False

    def __init__(self) -> None:
        self.sent: list[tuple[int, ...]] = []

    def send(self, tensor: Tensor, receiver: int) -> Sent:
        """Record the shape."""
        self.sent.append(tuple(tensor.shape))
        return Sent()

    def receive(self, shape: tuple[int, ...], *rest: object) -> tuple[Tensor, Sent]:
        """Return zeros."""
        return torch.zeros(shape, dtype=MESSAGE.dtype), Sent()


@pytest.mark.parametrize(
    ("length", "dtype", "told"),
    [
        (2, torch.float64, r"0F1 gives \[2, 4\] .* message .* is \[3, 4\] .* the same seq_length"),
        (4, torch.float64, r"0F1 gives \[4, 4\]"),
        (3, torch.float32, "0F1 gives .* in torch.float32"),
    ],
)
def test_a_message_of_another_shape_is_refused(length: int, dtype: torch.dtype, told: str) -> None:  # C40
    """A shorter message would arrive without an error, followed by old contents of the receiver's memory."""

    def forward(stage: int, micro: int, x: Tensor | None) -> Tensor:
        shape, made = (MESSAGE.shape, MESSAGE.dtype) if micro == 0 else ((length, WIDTH), dtype)
        return torch.zeros(shape, dtype=made, requires_grad=True)

    p2p = FirstRank()
    with pytest.raises(LayoutError, match=told):
        Executor(interleaved(2, 1, 2), p2p, MESSAGE, forward).run()
    assert p2p.sent == [MESSAGE.shape]


def test_an_output_is_released_when_it_is_sent() -> None:
    """The graph is kept, but not activations that it does not need."""
    plan = interleaved(2, 1, 3)
    outputs: list[weakref.ref] = []
    alive: list[int] = []

    def forward(stage: int, micro: int, x: Tensor | None) -> Tensor:
        output = torch.zeros((3, WIDTH), dtype=torch.float64, requires_grad=True) + 1.0
        outputs.append(weakref.ref(output))
        return output

    def count(action: Action) -> None:
        alive.append(sum(output() is not None for output in outputs))

    Executor(plan, FirstRank(), MESSAGE, forward, listener=Listener(on_begin=count)).run()
    assert len(outputs) == 3
    assert set(alive) == {0}


def test_a_stage_without_anything_to_train_sends_no_gradient_back() -> None:
    """Frozen layers at the beginning of a model."""
    plan = interleaved(1, 2, 2)
    weight = torch.ones(WIDTH, dtype=torch.float64, requires_grad=True)

    def forward(stage: int, micro: int, x: Tensor | None) -> Tensor:
        return torch.ones((3, WIDTH), dtype=torch.float64) if x is None else (x * weight).sum()

    Executor(plan, PipelineP2P(ParallelGroups.single()), MESSAGE, forward).run()
    torch.testing.assert_close(weight.grad, torch.full_like(weight, 6.0))


def test_unknown_lengths_and_sends_that_are_waited_for_exclude_one_another() -> None:
    with pytest.raises(LayoutError, match="overlap_p2p_communication=False"):
        Executor(interleaved(2, 1, 2), FirstRank(), UNKNOWN, Chain.forward, overlap=False)


def test_lengths_are_those_that_were_said() -> None:
    assert ragged(3).shape_of(1) == (3, WIDTH)
    assert ragged(3).shape_of(2) == (4, WIDTH)
    assert MESSAGE.shape_of(7) == MESSAGE.shape


def _through_queues(size: int, *, own_groups: bool) -> None:
    """Every schedule, with messages of a group in one queue; without WHOLE_MATRIX=1 a third of the plans."""
    with one_queue_for_each_group(), mock.patch.object(groups_module, "messages_share_stream", lambda: own_groups):
        for plan in islice(_plans(size), 0, None, 1 if WHOLE_MATRIX else 3):
            groups = ParallelGroups(Grid(pp=size), dist.get_rank())
            p2p = PipelineP2P(groups)
            p2p.warm_up(torch.device("cpu"), plan.stage_to_rank)
            _run(plan, p2p, seed=1)


def test_every_schedule_runs_if_messages_of_a_group_share_a_stream() -> None:
    """NCCL with a device in init_process_group: a receive that is posted ahead blocks the sends after it."""
    run_ranks(4, partial(_through_queues, own_groups=True), 4, timeout=240.0)
    with pytest.raises(RankFailure, match="DEADLOCK"):
        run_ranks(4, partial(_through_queues, own_groups=False), 4, timeout=240.0)


def test_groups_of_links_are_created_for_a_bound_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    world = SimpleNamespace(bound_device_id=torch.device("cuda", 0))
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "nccl")
    monkeypatch.setattr(dist, "group", SimpleNamespace(WORLD=world))
    assert groups_module.messages_share_stream()
    world.bound_device_id = None
    assert not groups_module.messages_share_stream()
    monkeypatch.setattr(dist, "get_backend", lambda group=None: "gloo")
    world.bound_device_id = torch.device("cpu")
    assert not groups_module.messages_share_stream()
