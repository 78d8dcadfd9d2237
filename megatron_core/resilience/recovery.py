"""``--recover in-process``: training continues in the same processes after a rank has died, hung or raised.

A supervisor in each process of the launcher outlives its training process (``processes``), as does the memory
to which each rank copies its state before every step. After a failure all ranks connect, build process groups and model
again, and load the newest copy that all of them have. A step is a function of state and samples, so that the weights
at the end are those of an undisturbed run.
"""

import gc
import importlib
import math
import os
import signal
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from types import FrameType

import torch.distributed as dist

from megatron_core.config import RunConfig
from megatron_core.config.validate import check
from megatron_core.cpu_ranks.interrupt import InterruptedWait
from megatron_core.cpu_ranks.shared_memory import backend as shared_memory
from megatron_core.errors import MegatronError, RestartNeeded
from megatron_core.features.outer_steps.settings import OuterConfig
from megatron_core.parallel import World, rank_local
from megatron_core.parallel.exit_status import FAILED, RESTART, exit_explanation
from megatron_core.parallel.launch import connect, connect_to_running_job, join
from megatron_core.parallel.texts import listed
from megatron_core.resilience.faults import die_in_recovery
from megatron_core.resilience.gpu_groups import obstacle_to_reuse, prepare_gpu, replace_process
from megatron_core.resilience.processes.memory import FINISHED, GENERATION, INVITED, ITERATION, WAITS, HostMemory
from megatron_core.resilience.processes.monitor import Monitor
from megatron_core.resilience.processes.rendezvous import LOST_STATE, Failure, Members, Rendezvous, connection
from megatron_core.resilience.processes.supervisor import Supervisor
from megatron_core.resilience.recovery_choice import choice_of, describe_recovery, with_groups
from megatron_core.resilience.settings import RecoveryConfig
from megatron_core.resilience.state_copies import HostCopy, StateCopies, choose_mirror, copies_to_load
from megatron_core.resilience.wrong_step import WrongStepError
from megatron_core.training.built_in_callbacks import SIGNALS
from megatron_core.training.pretrain import Job, start_once
from megatron_core.training.setup import Run

MEETING = 60.0
"""Time limit of the rendezvous after a failure, in seconds."""
NOTICE = 2.0
"""Seconds to wait for the reason of a lost connection."""
SAVE_SECONDS = 1.0
"""Seconds to wait for a background save after a failure; a process whose save takes longer is replaced."""
MOST = 5
"""Recoveries to one iteration after which the job ends."""
POLL = 0.01
UNFINISHED = "a rank that has not completed its last step did not reach"

_inherited: list[dist.Store] = []
"""The supervisor's connection. A training process must not destroy it: its threads exist only in the supervisor."""


def start_with_recovery(config: RunConfig, world: World, job: Job) -> None:
    """Supervise this rank's training process, and return in it after the last step.

    Errors: ``RestartNeeded`` if the job cannot continue.
    """
    if world.size == 1:
        return start_once(config, world, job)
    check(config, world.size)
    timeout = timedelta(minutes=config.parallel.distributed_timeout_minutes)
    settings = config.section(RecoveryConfig)
    world.store = (connect_to_running_job if settings.recover_join else connect)(world, timeout)
    model = config.model
    if model.recompute_granularity is not None or model.has_recurrence or config.optional("trains_indexers"):
        importlib.import_module("torch._dynamo")  # recomputation loads it, in 1.5 s; loaded here, new processes have it
    memory, mirror = HostMemory(rank=world.rank), HostMemory(rank=world.rank)
    if settings.recover_join:
        memory.numbers[GENERATION] = WAITS
    store = dist.PrefixStore("recovery", world.store)
    rendezvous = Rendezvous(store, world.rank, world.size, choice_of(config, world.size))
    _inherited.append(world.store)
    respawns = not settings.recover_without_spare
    earlier = Supervisor(rendezvous, memory, mirror, restart_status=RESTART, respawns=respawns).start()
    prepare_gpu(world)
    Recovery(config, world, memory, mirror, is_fresh=earlier > 0 or settings.recover_join).run(job)


class Regrouped(InterruptedWait):
    """Raised to create the process groups again for a rank that joins; no rank has failed."""


class Recovery:
    """The generations of one training process."""

    def __init__(
        self, config: RunConfig, world: World, memory: HostMemory, mirror: HostMemory, *, is_fresh: bool
    ) -> None:
        """``mirror``: copies of another rank. ``is_fresh``: this process takes the place of one that has died."""
        assert world.store is not None, "the supervisor has connected to it"
        self.config = config
        self.world = world
        self.memory = memory
        self._mirror = mirror
        self._is_fresh = is_fresh
        self._store = world.store = connection(world.store)
        store = dist.PrefixStore("recovery", self._store)
        self._choice = choice_of(config, world.size)
        self._rendezvous = Rendezvous(store, world.rank, world.size, self._choice)
        self._limit = 60.0 * config.parallel.distributed_timeout_minutes
        self._monitor = Monitor(self._rendezvous.clone(), memory, self._limit)
        self._settings = config.section(RecoveryConfig)
        self._rank, self._size = world.rank, world.size
        self.stop_reason = ""
        """Reason to stop from a signal between two generations."""
        self.generation = self._joins = 0
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.stop_reason = signal.Signals(number).name

    def run(self, job: Job) -> None:
        """Train until the end, in as many generations as needed."""
        self.world.watchdog = self._monitor
        self.world.memory = self.memory
        if self._settings.recover_join and self._is_fresh and not self._await_invitation():
            return
        self.generation = self._rendezvous.next_generation(self.memory.numbers[GENERATION])
        while True:
            try:
                self._run_generation(job)
                return
            except Exception as error:
                self._monitor.pause()
                if not isinstance(error, Regrouped):
                    self._explain(error)
            wrong = self._rendezvous.wrong(self.generation)
            if wrong is not None and self._rank in wrong.ranks:
                os._exit(RESTART)
            self._tear_down()
            self.generation = self._rendezvous.next_generation(self.generation + 1)

    def _await_invitation(self) -> bool:
        """Ask the other ranks to admit this rank; return False if the job ends before the next rendezvous.

        The request waits until the other ranks have detected the loss of this rank.
        """
        memory, rendezvous, rank = self.memory.numbers, self._rendezvous, self._rank
        memory[GENERATION] = WAITS
        other_ranks = [other for other in range(self._size) if other != rank]

        def they_meet() -> bool:  # they complete their step before
            self.generation = rendezvous.next_generation(self.generation)
            return any(rendezvous.has_arrived(self.generation, other) for other in other_ranks)

        joined = self._until(lambda: rendezvous.is_lost(rank))
        if joined:
            rendezvous.ask_to_join()
            joined = self._until(lambda: not rendezvous.is_lost(rank))
        if joined:
            memory[GENERATION] = INVITED
            joined = self._until(they_meet)
        memory[GENERATION] = self.generation
        memory[FINISHED] = not joined
        return joined

    def _until(self, is_reached: Callable[[], bool]) -> bool:
        """Wait until ``is_reached``; False if the job ends before."""
        while not is_reached():
            if self._rendezvous.ended() is not None:
                return False
            time.sleep(POLL)
        return True

    def _run_generation(self, job: Job) -> None:
        """Join the rendezvous and process groups of this generation, train, and wait until all ranks are complete."""
        generation = self.generation
        world = self.world
        self.memory.numbers[GENERATION] = generation
        self._joins = 0
        self._monitor.watch(generation)
        self._rendezvous.arrive(generation, self.memory.copies() + self._mirror.copies(), fresh=self._is_fresh)
        self._is_fresh = False
        members = self._meet()
        self._refuse_repetition(members)
        ranks = members.training
        self._end_without_state(members)
        if self._rank not in ranks:
            return self._stand_aside()
        world.rank, world.size, world.launched = ranks.index(self._rank), len(ranks), ranks
        world.launcher_size = self._size
        config, copy = self.config, None
        if members.iteration >= 0:
            copy = HostCopy(copies_to_load(members, self._rendezvous, self.memory, self._mirror))
            config = RunConfig.from_flat(copy.state["config"])
            config = config.with_section(self.config.section(OuterConfig))  # the copy may have fewer groups
        else:
            self.memory.forget()
        config = with_groups(config, self._size, len(ranks))
        if self._settings.recover_mirror:
            choose_mirror(self.memory, ranks)
        if world.size > 1:
            join(
                config.parallel.distributed_backend,
                world.device.type,
                store=dist.PrefixStore(f"world/{generation}", self._store),
                rank=world.rank,
                world_size=world.size,
                timeout=timedelta(minutes=config.parallel.distributed_timeout_minutes),
            )
        if generation:
            die_in_recovery(config, self.memory, members.iteration + 1)
        run = job.set_up(config, world, copy)
        run.stop_reason = self.stop_reason
        try:
            job.train(run, [StateCopies(self)], is_new=copy is None)
        except Exception:
            self._leave(run)
            raise
        self._rendezvous.finish(generation)
        self._wait(lambda: self._rendezvous.all_finished(generation, ranks), self._limit, lambda: UNFINISHED)
        self._monitor.pause()
        self.memory.numbers[FINISHED] = 1
        self._rendezvous.end(0, "the job is complete")

    def _end_without_state(self, members: Members) -> None:
        """End the job if the remaining ranks are too few for a replica, or lack a part of its state.

        Errors: ``RestartNeeded`` with the reason.
        """
        what = ""
        if not members.training:
            what = "the remaining ranks are too few for a copy of the model and its experts: a restart is needed"
        elif members.iteration == LOST_STATE:
            what = (
                "a part of the weights or the optimizer state has no copy left: a restart is needed; --recover-mirror "
                "keeps a copy of each rank's state on another host"
            )
        if what:
            self._rendezvous.end(RESTART, what)
            raise RestartNeeded(what)

    def _stand_aside(self) -> None:
        """Wait for the end of this generation as a spare rank: its batch or layout cannot use this rank."""
        self._wait(lambda: self._rendezvous.replaced(self.generation) is not None, math.inf, lambda: UNFINISHED)
        if self._rendezvous.replaced(self.generation) is not None:
            raise Regrouped
        self._monitor.pause()
        self.memory.numbers[FINISHED] = 1

    def regroup_when_due(self, iteration: int) -> None:
        """Raise ``Regrouped`` if the groups are made again after ``iteration``; this rank has copied its state.

        The first rank announces it one step ahead, when a lost rank has asked to join: a later step of any other rank
        begins after a collective of this step, and so after the announcement.
        """
        if not self._settings.recover_without_spare:
            return
        planned = self._rendezvous.replaced(self.generation)
        if planned is not None and iteration >= planned[0]:
            raise Regrouped(planned[1])
        if self.world.rank == 0 and planned is None and self._rendezvous.count_joins() > self._joins:
            joining = self._rendezvous.joining()
            count = self._rendezvous.count_joins()
            members = self._decided(self.generation)
            wanted = self._choice.training([*members.ranks, *joining])
            # Otherwise these wait for further ranks of a replica or a group.
            if joining and len(wanted) > len(members.training):
                self._rendezvous.replace(self.generation, iteration + 1, f"rank {listed(joining)} joins")
                self._rendezvous.take_in(joining)
            self._joins = count

    def _meet(self) -> Members:
        """Wait for the other ranks, which may have to start."""
        rendezvous = self._rendezvous
        limit = MEETING if self.generation else max(MEETING, self._limit)
        self._wait(
            lambda: rendezvous.members(self.generation) is not None,
            limit,
            lambda: f"rank {listed(rendezvous.absent(self.generation))} did not reach",
        )
        return self._decided(self.generation)

    def _decided(self, generation: int) -> Members:
        members = self._rendezvous.decided(generation)
        assert members is not None, "all ranks have met"
        return members

    def _wait(self, is_done: Callable[[], bool], limit: float, missing: Callable[[], str]) -> None:
        """Wait until ``is_done``; ``InterruptedWait`` if the generation fails; it fails after ``limit`` seconds."""
        deadline = time.monotonic() + limit
        while not is_done():
            failure = self._rendezvous.failure(self.generation)
            ended = self._rendezvous.ended()
            if ended is not None and ended.status == 0:
                return  # all ranks are complete
            if failure is not None:
                raise InterruptedWait(failure.what)
            if ended is not None:
                raise InterruptedWait(ended.reason)
            if time.monotonic() > deadline:
                what = f"{missing()} the rendezvous of the ranks within {limit:.0f} s"
                self._rendezvous.fail(self.generation, Failure(self._rank, what, self.memory.numbers[ITERATION]))
            time.sleep(POLL)

    def _refuse_repetition(self, members: Members) -> None:
        """``MegatronError`` if the last ``MOST`` generations continued from the same iteration.

        A generation that failed before its members were decided is a part of the recovery after it.
        """
        count = 0
        for number in range(self.generation - 1, -1, -1):
            earlier = self._rendezvous.decided(number)
            if earlier is not None and (earlier.iteration, earlier.rollbacks) != (members.iteration, members.rollbacks):
                break
            count += earlier is not None
        failure = self._rendezvous.failure(self.generation - 1) if self.generation else None
        if count > MOST and failure is not None:
            raise MegatronError(
                f"{count} recoveries to iteration {max(members.iteration, 0)} without a complete step; the last "
                f"failure: {failure.what}. Change what causes it (data, settings, code, hardware)"
            )

    def _explain(self, error: Exception) -> None:
        """Find out whether the job can continue after ``error``, and publish it if no other rank has failed before.

        Errors: ``error`` if a user must fix it, ``RestartNeeded`` if another rank has ended the job.
        """
        if isinstance(error, WrongStepError) and self._steps_back(error):
            return
        explanation = exit_explanation(error)
        deadline = time.monotonic() + (NOTICE if explanation is not None and explanation[0] == RESTART else 0.0)
        while self._rendezvous.failure(self.generation) is None:
            ended = self._rendezvous.ended()
            if ended is not None and not (explanation is not None and explanation[0] == FAILED):
                raise RestartNeeded(ended.reason) from error
            if time.monotonic() >= deadline:
                self._publish(error, explanation)
                return
            time.sleep(POLL)

    def _steps_back(self, error: WrongStepError) -> bool:
        """Publish wrong values of a step, whose copies do not count any more; False if no other copy is left."""
        if all(copy.iteration >= error.first for copy in self.memory.copies()):
            return False
        what = str(error).partition(". ")[0]
        failure = Failure(self._rank, what, self.memory.numbers[ITERATION], first=error.first, ranks=error.ranks)
        self._rendezvous.fail(self.generation, failure)
        return True

    def _publish(self, error: Exception, explanation: tuple[int, str] | None) -> None:
        """Report this rank's own ``error`` as the failure of the generation; raise it if a user must fix it."""
        if explanation is not None and explanation[0] == FAILED:
            self._rendezvous.end(FAILED, f"rank {self._rank} has ended: {explanation[1].splitlines()[0][:200]}")
            raise error
        if explanation is None:
            traceback.print_exception(error)
        text = explanation[1] if explanation is not None else f"{type(error).__name__}: {error}"
        what = f"rank {self._rank} raised {text.splitlines()[0][:200]}"
        self._rendezvous.fail(self.generation, Failure(self._rank, what, self.memory.numbers[ITERATION]))

    def _tear_down(self) -> None:
        """Free groups, model and state of the failed generation."""
        self.world.prefix = ""
        self.memory.before_commit = lambda: None
        if (reason := obstacle_to_reuse(self.world.device)) is not None:
            replace_process(self.world.prefix, f"rank {self._rank} is replaced by a new process: {reason}")
        try:
            dist.destroy_process_group()
        except (AssertionError, RuntimeError, ValueError):  # they were aborted, or not made yet
            dist.distributed_c10d._world.pg_map.clear()
        shared_memory.forget()
        rank_local.forget_rank()
        gc.collect()

    def _leave(self, run: Run) -> None:
        """Store the reason to stop, and release the folders of a failed generation.

        If a background save does not end, the process is killed and replaced.
        """
        self.stop_reason = run.stop_reason or self.stop_reason
        run.data_parallel.release()
        if not run.saver.join(SAVE_SECONDS):
            replace_process(run.world.prefix, "a save in the background did not end")
        run.saver.release()

    def report_training(self) -> None:
        """Report that the first step of this generation starts."""
        self._rendezvous.train(self.generation)

    def describe(self) -> str:
        """Describe the failure before this generation and the recovery in one line."""
        failures = self._rendezvous.failures(self.generation)
        planned = self._rendezvous.replaced(self.generation - 1)
        members = self._decided(self.generation)
        return describe_recovery(self.config, self._size, members, failures, "" if planned is None else planned[1])
