"""Disturb jobs in simulated worlds by random faults, recover them as real jobs do, and compare their ends.

python -m tests.end_to_end.recovery_simulated --faults 10000 --out runs/recovery_simulated.json

The ranks of a job are threads, and their copies of the state are in shared memory, which survives a world that ends.
After a fault the remaining ranks meet, and a new world continues from the copies. Deaths occur at points of a step and
of a recovery; with a spare, without a process for the rank, or without its memory, too. Ends with the same layout must
be bitwise equal to those of an undisturbed job, others to 1e-9 in float64.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import tyro

from megatron_core.checkpoint import Box
from megatron_core.checkpoint.manifest import TORCH_DTYPES
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.resilience.link_checks import LinkChecks
from megatron_core.resilience.links.faults import LinkFault
from megatron_core.resilience.links.recorder import LINKS
from megatron_core.resilience.processes.memory import GENERATION, MIRRORED, Copy, HostMemory
from megatron_core.resilience.processes.rendezvous import LOST_STATE, Failure, Members, Rendezvous
from megatron_core.resilience.recovery_choice import choice_of, with_groups
from megatron_core.resilience.settings import LINK_AXES, LINK_DAMAGES
from megatron_core.resilience.state_copies import HostCopy, LocalCopy, StateCopies
from megatron_core.training.callbacks import Callback, Callbacks
from megatron_core.training.setup import set_up
from megatron_core.training.step import StepResult, train_step
from megatron_core.verify.ranks import RankFailure, run_simulated
from tests.checkpoint.runs import SMALL
from tests.end_to_end.recovery_table import Seen, layout_of, table

STEPS = 4
ROOM = 1 << 22
JOB = SMALL | {"num_layers": 2, "train_iters": STEPS, "hidden_dropout": 0.1, "global_batch_size": 4, "seed": 7}
JOB |= {"micro_batch_size": 1, "recover": "in-process"}
CHECKED = {"link_check_interval": 1, "check_pipeline_messages": True}
MOE = {"num_experts": 4, "moe_router_topk": 2, "disable_bias_linear": True}
GROUPS = {"outer_steps": 2, "outer_lr": 0.9}
STREAMS = GROUPS | {"outer_fragments": 2, "outer_delay": 1, "outer_alpha": 0.25}
CASES: dict[str, dict[str, Any]] = {
    "dp2": {},
    "dp4 zero1": {},
    "dp4 zero2": {},
    "dp2 zero3": {},
    "tp2 dp2 zero1": {},
    "pp2 dp2": {},
    "pp2 dp2 zero2": {},
    "cp2 dp2 zero1": {},
    "dp4 ep2 zero1": MOE,
    "tp2 pp2 dp2 zero1": {},
    "dp2, groups": GROUPS,
    "tp2 dp2, groups": GROUPS,
    "dp4 zero1, groups": STREAMS,
}
DEATHS = ("kill", "kill-copy", "kill-gradients", "kill-update", "kill-recovery")
LOSSES = ("spare", "process", "host")
"""Ways to lose a rank: a new process takes its place; none does; none does, and its memory is lost, too."""


class RankDiedError(Exception):
    """An injected death."""


class RegroupedError(Exception):
    """A rank joins."""


@dataclass(frozen=True)
class Planned:
    """A fault of a job."""

    kind: str
    rank: int
    """Of the launcher."""
    step: int
    loss: str = "spare"
    joins: int | None = None
    """The iteration after which the lost rank joins again."""


class Disturbed:
    """The part of a recovery that ``StateCopies`` uses, and the deaths of one rank."""

    def __init__(self, memory: HostMemory, mirror: HostMemory | None, faults: Sequence[Planned], job: Members) -> None:
        self.memory, self._mirror, self._faults, self._job = memory, mirror, faults, job
        self.generation, self.iteration = memory.numbers[GENERATION], max(job.iteration, 0)
        self.joins: int | None = None
        memory.before_commit = partial(self.die, "kill-copy")

    def report_training(self) -> None:
        """No later failure is reported together with earlier ones."""

    def describe(self) -> str:
        """A note of the recovery."""
        return f"generation {self.generation}"

    def die(self, kind: str) -> None:
        """Raise if this death is due in the next step."""
        for fault in self._faults:
            if (fault.kind, fault.rank, fault.step) == (kind, self.memory.rank, self.iteration + 1):
                raise RankDiedError(f"rank {fault.rank} died in step {fault.step} by {kind}")

    def regroup_when_due(self, iteration: int) -> None:
        """Mirror the copy of ``iteration``, and end the world if a rank joins after it."""
        if self._mirror is not None:
            self._copy_to(self._mirror, iteration)
        if iteration == self.joins:
            dist.barrier()  # all ranks have copied their state
            raise RegroupedError(f"a rank joins after iteration {iteration}")

    def _copy_to(self, mirror: HostMemory, iteration: int) -> None:
        copy = Copy(self.memory.rank, iteration, self.generation)
        text, state, data = self.memory.read(copy)
        mirror.begin()[: len(data)].copy_(data)
        mirror.commit_copy(copy, text, state, len(data))
        self.memory.numbers[MIRRORED] = copy.stamp


def sources(members: Members, memory: HostMemory, all_memory: Sequence[Sequence[HostMemory]]) -> Iterator[LocalCopy]:
    """As ``sources_of``, with the memory of all ranks at hand."""
    for copy in sorted(members.copies, key=lambda copy: (copy.owner - memory.rank) % len(all_memory)):
        for held in all_memory[members.holders[copy.owner]]:
            if copy in held.copies():
                if held is memory:
                    memory.choose(copy)
                yield LocalCopy(held, copy)
                break


def rank_of_job(
    settings: dict[str, Any],
    members: Members,
    memories: Sequence[Sequence[HostMemory]],
    faults: Sequence[Planned],
    joins: int | None = None,
) -> None:
    """Train from the copies of ``members`` to the end."""
    place = dist.get_rank()
    rank = members.training[place]
    neighbour = members.training[place - 1]
    memory = memories[rank][0]
    job = Disturbed(memory, memories[neighbour][1] if len(members.training) > 1 else None, faults, members)
    job.joins = joins
    world = World(place, len(members.training), 0, torch.device("cpu"), memory=memory, launched=members.training)
    copy = None if members.iteration < 0 else HostCopy(sources(members, memory, memories))
    config = with_groups(RunConfig.from_flat(settings), len(memories), world.size)
    run = set_up(config, world, copy=copy)
    if job.generation:
        job.die("kill-recovery")
    LINKS.faults.name_groups(run.groups)
    LINKS.faults.remembers = any(fault.kind.endswith("stale") for fault in faults)
    called = Callbacks(run, [LinkChecks(run), StateCopies(job), Injected(job, faults)])
    with called.running():
        while run.state.iteration < STEPS:
            called.call("before_step")
            result = train_step(run, hooks=called.step_hooks)
            called.call("after_step", result)
        called.call("before_step")  # the end is read from the copies


class Injected(Callback):
    """Deaths within a step, and faults of transfers."""

    priority = -100

    def __init__(self, job: Disturbed, faults: Sequence[Planned]) -> None:
        self._job, self._faults = job, faults

    def before_step(self) -> None:
        """Die before the step, or damage its next transfer."""
        self._job.iteration = self.run.state.iteration
        self._job.die("kill")
        for fault in self._faults:
            link = LinkFault.of(fault.kind)
            if link is not None and (fault.rank, fault.step) == (self._job.memory.rank, self._job.iteration + 1):
                LINKS.faults.arm(link)

    def before_update(self) -> None:
        """Die with the sums of gradients."""
        self._job.die("kill-gradients")

    def is_bad(self, loss: float, grad_norm: float) -> bool:
        """Die with the decision to update."""
        self._job.die("kill-update")
        return False

    def after_step(self, result: StepResult) -> None:
        """Forget a fault of a transfer that did not occur."""
        LINKS.faults.disarm()


@dataclass
class Outcome:
    """The end of a job."""

    tensors: dict[str, torch.Tensor]
    ranks: int
    """Number of ranks at the end."""
    messages: list[str]
    """The message of each failure."""
    seconds: list[float]
    """Time from each failure to the first step after it, without that of the operating system for a new process."""


def run_job(case: str, faults: Sequence[Planned] = ()) -> Outcome:
    """Run a job with ``faults`` to its end. ``AssertionError`` if it cannot continue."""
    layout = layout_of(case)
    size = layout.world_size
    without_spare = any(fault.loss != "spare" for fault in faults)
    settings = JOB | layout.settings() | CASES[case] | {"recover_without_spare": without_spare}
    settings |= {"recover_mirror": without_spare}
    settings |= CHECKED if any(fault.kind not in DEATHS for fault in faults) else {"link_check_interval": None}
    choice, store = choice_of(RunConfig.from_flat(settings), size), dist.HashStore()
    meetings = [Rendezvous(store, rank, size, choice) for rank in range(size)]
    memories = [(HostMemory(ROOM, rank=rank), HostMemory(ROOM, rank=rank)) for rank in range(size)]
    left, outcome = list(faults), Outcome({}, size, [], [])
    joins = {fault.joins: fault.rank for fault in faults if fault.joins is not None}
    for generation in range(3 * len(faults) + 1):
        began = time.monotonic()
        for rank, (memory, mirror) in enumerate(memories):
            memory.numbers[GENERATION] = generation
            if not meetings[rank].is_lost(rank):
                meetings[rank].arrive(generation, memory.copies() + mirror.copies(), fresh=False)
        members = meetings[0].members(generation)
        assert members is not None and members.iteration != LOST_STATE and members.training, members
        lost = [meetings[0].is_lost(rank) for rank in range(size)]
        due = min((after for after, rank in joins.items() if lost[rank]), default=None)
        try:
            run_simulated(len(members.training), rank_of_job, settings, members, memories, left, due, timeout=1200.0)
        except RankFailure as failure:
            message = str(failure).strip().splitlines()[-1]
            if due is not None and f"a rank joins after iteration {due}" in message:
                meetings[0].replace(generation, due, message)
                meetings[0].take_in([joins[due]])
                memories[joins[due]] = HostMemory(ROOM, rank=joins[due]), HostMemory(ROOM, rank=joins[due])
                continue
            outcome.messages.append(message)
            outcome.seconds.append(time.monotonic() - began)
            fault = next((fault for fault in left if is_named(message, fault)), None)
            assert fault is not None, f"{case} {faults}: {failure}"
            left.remove(fault)
            if fault.kind in DEATHS and fault.loss != "spare":
                if fault.loss == "host":
                    for memory in memories[fault.rank]:
                        memory.forget()
                held = [copy for memory in memories[fault.rank] for copy in memory.copies()]
                meetings[0].lose(fault.rank, held)
            meetings[0].fail(generation, Failure(fault.rank, message, fault.step))
            continue
        outcome.ranks = len(members.training)
        outcome.tensors = ends(members.training, memories, generation)
        return outcome
    raise AssertionError(f"{case} {faults}: {outcome.messages}")


def is_named(message: str, fault: Planned) -> bool:
    """Whether ``message`` names the rank, the step and the class of ``fault``."""
    if fault.kind in DEATHS:
        return f"rank {fault.rank} died in step {fault.step} by {fault.kind}" in message
    return f"step {fault.step}: " in message and f"rank {fault.rank} received" in message.replace("ranks", "rank")


def ends(training: Sequence[int], memories: Sequence[Sequence[HostMemory]], generation: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state after the last step, by name, from the copies of all ranks."""
    boxes: dict[str, dict[Box, torch.Tensor]] = {}
    for rank in training:
        copy = Copy(rank, STEPS, generation)
        table, _, data = memories[rank][0].read(copy)
        for name, start, stop, dtype, at in json.loads(table):
            box = Box(tuple(start), tuple(stop))
            kind = TORCH_DTYPES[dtype]
            values = data[at : at + box.numel * kind.itemsize].view(kind).view(box.shape)
            boxes.setdefault(name, {})[box] = values
    found = {}
    for name, parts in boxes.items():
        shape = [max(stops) for stops in zip(*(box.stop for box in parts), strict=True)]
        found[name] = torch.zeros(shape, dtype=next(iter(parts.values())).dtype)
        for box, values in parts.items():
            found[name][box.index] = values
    return found


def differences(found: Outcome, expected: Outcome) -> list[str]:
    """The tensors in which two ends differ, by a bit or, with other numbers of ranks, by more than 1e-9."""
    if found.tensors.keys() != expected.tensors.keys():
        return sorted(found.tensors.keys() ^ expected.tensors.keys())
    if found.ranks == expected.ranks:
        return [name for name, value in expected.tensors.items() if not torch.equal(found.tensors[name], value)]
    pairs = ((name, found.tensors[name], value) for name, value in expected.tensors.items())
    return [name for name, a, b in pairs if not torch.allclose(a, b, rtol=1e-9, atol=1e-9)]


def drawn(chance: random.Random, case: str) -> list[Planned]:
    """Up to three faults of a job, of which at most one takes a rank away."""
    size, axes = layout_of(case).world_size, {axis for axis in ("tp", "cp", "dp", "pp", "ep") if axis in case}
    links = [f"{axis}-{damage}" for axis in LINK_AXES for damage in LINK_DAMAGES if axis in axes]
    steps = sorted(chance.sample(range(2, STEPS + 1), chance.randint(1, 3)))
    loss = "spare" if case.endswith(", groups") else chance.choice(LOSSES)
    kinds = [chance.choice(DEATHS[:-1]) if loss != "spare" or chance.random() < 0.6 else chance.choice(links)]
    if loss == "spare":
        kinds += [chance.choice((*DEATHS[:-1], *links)) for _ in steps[1:]]
    given = [Planned(kind, chance.randrange(size), step, loss) for kind, step in zip(kinds, steps, strict=False)]
    if given[0].kind in DEATHS and chance.random() < 0.2 and loss == "spare":
        step = given[0].step - (given[0].kind == "kill-copy")  # not all ranks have copied the state before the step
        given.append(Planned("kill-recovery", chance.randrange(size), step))
    return given


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Disturb simulated jobs by random faults, and write the results."""

    faults: int = 10_000
    """Total number of faults over all layouts."""
    seed: int = 0
    """Seed for kinds, ranks, steps and losses."""
    processes: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Number of jobs at the same time."""
    out: str = "runs/recovery_simulated.json"
    """File to write; the table has the same name with .md."""


def disturb(number: int, seed: int) -> tuple[list[tuple[str, bool, float]], str]:
    """Run job ``number``: kind, whether it was named and seconds of each fault that occurred, and the fault of its end
    or ""."""
    case = list(CASES)[number % len(CASES)]
    given = drawn(random.Random(f"{seed}:{number}"), case)
    expected, found = undisturbed(case), run_job(case, given)
    seen = []
    left = list(zip(found.messages, found.seconds, strict=True))
    for fault in given:
        mine = [each for each in left if is_named(each[0], fault)]
        if mine:
            left.remove(mine[0])
            seen.append((fault.kind, True, mine[0][1]))
    seen += [("unknown", False, seconds) for _, seconds in left]
    wrong = differences(found, expected)
    return seen, f"{case} {given}: {wrong} differ from the undisturbed job" if wrong else ""


@cache
def undisturbed(case: str) -> Outcome:
    """The end of a job without faults."""
    return run_job(case)


def main() -> int:
    """Draw jobs until the number of faults is reached."""
    settings = tyro.cli(Settings, description=__doc__)
    torch.set_num_threads(1)
    seen, out, wrong = dict[str, Seen](), Path(settings.out), list[str]()
    out.parent.mkdir(parents=True, exist_ok=True)
    batch = 2 * len(CASES)
    with ProcessPoolExecutor(settings.processes, mp_context=multiprocessing.get_context("fork")) as pool:
        for first in range(0, settings.faults, batch):
            jobs = pool.map(partial(disturb, seed=settings.seed), range(first, first + batch))
            for faults, fault in jobs:
                wrong += [fault] if fault else []
                for kind, is_found, seconds in faults:
                    own = seen.setdefault(kind, Seen())
                    own.faults, own.named = own.faults + 1, own.named + is_found
                    own.seconds.append(seconds)
            count = sum(one.faults for one in seen.values())
            out.write_text(json.dumps({kind: asdict(one) for kind, one in seen.items()}, indent=1) + "\n")
            out.with_suffix(".md").write_text(table(seen))
            print(f"{count} faults survived, {len(wrong)} wrong ends", file=sys.stderr, flush=True)
            if count >= settings.faults or wrong:
                break
    print("\n".join(wrong) or table(seen))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
