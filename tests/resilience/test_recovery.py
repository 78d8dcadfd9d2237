"""Decisions of one training process in a recovery; the other ranks are views of the same store."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_core.cpu_ranks.interrupt import InterruptedWait
from megatron_core.errors import MegatronError, RestartNeeded
from megatron_core.parallel.exit_status import RESTART
from megatron_core.parallel.world import World
from megatron_core.resilience import recovery
from megatron_core.resilience.faults import Faults
from megatron_core.resilience.processes.memory import FINISHED, GENERATION, INVITED, WAITS, Copy, HostMemory
from megatron_core.resilience.processes.rendezvous import LOST_STATE, Failure, Members, Rendezvous
from megatron_core.resilience.recovery import MOST, Recovery
from megatron_core.resilience.settings import FaultConfig
from megatron_core.resilience.state_copies import StateCopies
from megatron_core.resilience.wrong_step import WrongStepError
from megatron_core.training.built_in_callbacks import SIGNALS
from megatron_core.training.pretrain import Job
from tests.memory import needs_proc
from tests.runs import tiny_config, tiny_run

pytestmark = needs_proc
Make = Callable[..., tuple[Recovery, list[Rendezvous]]]
CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the process of the last rank of a job, and the views of all ranks."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    quiet = SimpleNamespace(watch=lambda generation: None, pause=lambda: None)
    monkeypatch.setattr(recovery, "Monitor", lambda *_: quiet)
    monkeypatch.setattr(recovery, "join", lambda *_, **__: None)

    def make(size: int, *, is_fresh: bool = False, **settings: Any) -> tuple[Recovery, list[Rendezvous]]:
        store = dist.HashStore()
        config = tiny_config(recover="in-process", **settings)
        memory, mirror = (HostMemory(1 << 16, rank=size - 1) for _ in range(2))
        process = Recovery(config, World(size - 1, size, 0, CPU, store=store), memory, mirror, is_fresh=is_fresh)
        return process, [Rendezvous(dist.PrefixStore("recovery", store), rank, size) for rank in range(size)]

    yield make
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_copy_counts_the_rollbacks_before_it() -> None:
    memory, run = HostMemory(1 << 22), tiny_run(num_layers=1)
    run.state.iteration, run.state.rollbacks = 3, 2
    writer = StateCopies(
        SimpleNamespace(memory=memory, generation=0, report_training=nothing, regroup_when_due=nothing)
    )
    writer.run = run
    writer.before_step()
    assert memory.copies() == [Copy(0, 3, 0, rollbacks=2)]


def nothing(*_: object) -> None:
    """A part of a recovery that a test does not need."""


class Never(Job):
    """A job that must not begin."""

    def set_up(self, *_: object) -> None:
        raise AssertionError("training has begun")


def exits(status: int) -> None:
    """The end of the process."""
    raise SystemExit(status)


def test_a_rank_with_wrong_values_ends_also_if_it_was_interrupted(made: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery.os, "_exit", exits)
    process, (other, _) = made(2)
    other.arrive(0, [], fresh=False)

    class Interrupted(Job):
        def set_up(self, *_: object) -> None:
            other.fail(0, Failure(0, "rank 1 computed wrong values", 4, first=4, ranks=(1,)))
            raise InterruptedWait("rank 1 computed wrong values")

    with pytest.raises(SystemExit, match=str(RESTART)):
        process.run(Interrupted())
    assert process.memory.numbers[GENERATION] == 0


def test_the_published_failure_names_the_first_wrong_step(made: Make) -> None:
    process, (rendezvous,) = made(1)
    begin(process.memory, 3, 4)
    assert process._steps_back(WrongStepError("rank 5 computed wrong values. Replace it", first=4, ranks=(5,)))
    found = rendezvous.wrong(0)
    assert found is not None and (found.what, found.first, found.ranks) == ("rank 5 computed wrong values", 4, (5,))
    assert not process._steps_back(WrongStepError("wrong data arrived", first=3))


def test_only_recoveries_that_were_decided_repeat_an_iteration(made: Make) -> None:
    process, (rendezvous,) = made(1)
    for generation in range(2 * MOST):
        rendezvous.fail(generation, Failure(0, "a rank of a host was lost", 4))
    for generation in (0, *range(MOST, 2 * MOST - 1)):
        decide(rendezvous, generation, 4)
    process.generation = 2 * MOST
    process._refuse_repetition(Members((0,), (0,), 4, 0, {}, ()))
    decide(rendezvous, 2 * MOST - 1, 4)
    with pytest.raises(MegatronError, match=f"{MOST + 1} recoveries to iteration 4 without a complete step"):
        process._refuse_repetition(Members((0,), (0,), 4, 0, {}, ()))
    process._refuse_repetition(Members((0,), (0,), 4, 0, {}, (), rollbacks=1))


def joining(made: Make) -> tuple[Recovery, list[Rendezvous], Thread, list[bool]]:
    """A rank that asks to join from a thread, and a list for the result."""
    process, rendezvous_of_ranks = made(2, is_fresh=True)
    found = list[bool]()
    thread = Thread(target=lambda: found.append(process._await_invitation()), daemon=True)
    thread.start()
    return process, rendezvous_of_ranks, thread, found


def reach(is_reached: Callable[[], bool]) -> None:
    """Wait until ``is_reached``."""
    deadline = time.monotonic() + 10
    while not is_reached():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_a_rank_joins_only_after_its_loss_was_noticed(made: Make) -> None:
    process, (first, _), thread, found = joining(made)
    first.arrive(0, [], fresh=False)
    time.sleep(0.1)
    assert not found and not first.joining() and process.memory.numbers[GENERATION] == WAITS
    first.lose(1)
    first.fail(0, Failure(1, "the supervisor of rank 1 has not answered", 3))
    reach(lambda: first.joining() == [1])
    first.arrive(1, [], fresh=False)
    first.replace(1, 5, "rank 1 joins")
    first.take_in([1])
    reach(lambda: process.memory.numbers[GENERATION] == INVITED)
    assert not found
    first.arrive(2, [], fresh=False)
    thread.join(10)
    assert found == [True] and process.memory.numbers[GENERATION] == 2 and not process.memory.numbers[FINISHED]


@pytest.mark.parametrize("reached", ["running", "lost", "invited"])
def test_a_rank_that_joins_leaves_at_the_end_of_the_job(reached: str, made: Make) -> None:
    process, (first, _), thread, found = joining(made)
    if reached != "running":
        first.lose(1)
        reach(lambda: first.joining() == [1])
    if reached == "invited":
        first.replace(0, 5, "rank 1 joins")
        first.take_in([1])
        reach(lambda: process.memory.numbers[GENERATION] == INVITED)
    first.end(0, "the job is complete")
    thread.join(10)
    assert found == [False] and process.memory.numbers[FINISHED] == 1


def test_faults_of_lost_ranks_are_not_reported_as_absent(capsys: pytest.CaptureFixture[str]) -> None:
    config = tiny_config(inject_fault=("kill@1:2", "kill@2:3", "kill@4:2"))
    world = World(0, 2, 0, CPU, launched=(0, 3), launcher_size=4)
    faults = config.section(FaultConfig).faults
    Faults.after_run(SimpleNamespace(run=SimpleNamespace(world=world), _faults=faults, _left=[]))  # type: ignore[arg-type]
    notes = capsys.readouterr().err
    assert notes.count("has not happened") == 1 and "kill@4:2" in notes


def begin(memory: HostMemory, *iterations: int) -> None:
    """Write empty copies."""
    for iteration in iterations:
        memory.begin()
        memory.commit(iteration, b"[]", {}, 0)


def decide(rendezvous: Rendezvous, generation: int, iteration: int, training: tuple[int, ...] | None = None) -> None:
    """Decide the members of a generation, in which all ranks are present."""
    ranks = tuple(range(rendezvous.size))
    members = Members(ranks, ranks if training is None else training, iteration, 0, {}, ())
    rendezvous._first(f"{generation}/members", json.dumps(asdict(members)))


@pytest.mark.parametrize(
    ("iteration", "training", "words"),
    [(LOST_STATE, (0,), "no copy left.*--recover-mirror"), (4, (), "too few for a copy of the model")],
)
def test_a_job_without_its_state_ends(iteration: int, training: tuple[int, ...], words: str, made: Make) -> None:
    process, (rendezvous,) = made(1)
    rendezvous.fail(0, Failure(0, "rank 0 was killed", 4))
    decide(rendezvous, 1, iteration, training)
    with pytest.raises(RestartNeeded, match=words):
        process.run(Never())
    end = rendezvous.ended()
    assert end is not None and end.status == RESTART
