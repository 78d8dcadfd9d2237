"""Defects in recoveries without a restart, and what finds each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from megatron_core.config import RunConfig
from megatron_core.verify.ranks import run_ranks
from tests.defects.patch import (
    Patch,
    Text,
    argument,
    attribute,
    call,
    condition,
    expression,
    returned,
    statement,
    without_call,
)
from tests.end_to_end.recovery_simulated import CASES, JOB, Planned, differences, run_job, undisturbed
from tests.features.outer_steps import test_optimizer as test_outer
from tests.resilience import test_groups_join, test_host_copy
from tests.resilience.processes import test_rendezvous


def same_end(case: str, *faults: Planned) -> None:
    """``AssertionError`` or ``RankFailure`` unless a disturbed simulated job ends as an undisturbed one."""
    found = run_job(case, faults)
    assert differences(found, undisturbed(case)) == [], f"{case} {faults}"


@dataclass(frozen=True)
class RecoveryDefect:
    """A changed function, and a check that must fail with it."""

    name: str
    """Title of the defect."""
    target: str
    """The function, ``module:Qualname`` inside the package."""
    patch: Patch | Text
    """The change of the function."""
    check: Callable[[], None]


IN_PLACE = partial(same_end, "dp2 zero3", Planned("kill-update", 1, 4))
BEFORE_LAST = partial(same_end, "dp2 zero3", Planned("kill-update", 1, 3))  # the learning rate of step 4 may be 0
FEWER = partial(same_end, "dp4 zero1", Planned("kill-gradients", 1, 4, "process"))
WITHOUT_HOST = partial(same_end, "dp4 zero1", Planned("kill-gradients", 1, 4, "host"))
IN_COPY = partial(same_end, "dp4 zero1", Planned("kill-copy", 2, 4))
IN_GROUP = partial(same_end, "dp2, groups", Planned("kill-update", 1, 4))
IN_FLIGHT = partial(same_end, "dp4 zero1, groups", Planned("kill", 3, 4))


def without_the_lost_group() -> None:
    """``AssertionError`` or ``RankFailure`` unless the other group continues on its own."""
    found = run_job("dp4 zero1, groups", [Planned("kill-update", 1, 4, "host")])
    groups = {name.partition(".")[0] for name in found.tensors if name.startswith("group")}
    assert found.ranks == 2 and groups == {"group1"}


def as_the_other_group(joined: int) -> None:
    """``AssertionError`` or ``RankFailure`` unless a group that joins in flight of an exchange ends as in one process.

    The copies before a step name the global weights otherwise than a checkpoint.
    """
    case = "dp4 zero1, groups"
    found = run_job(case, [Planned("kill-update", 3, 2, "process", joins=joined)])
    config = RunConfig.from_flat(JOB | CASES[case] | {"recover": "none"})
    (expected,) = run_ranks(1, test_groups_join.expected_state, config, 2, joined)
    names = {name: name.replace("outer.weights.", "model.") for name in found.tensors}
    assert found.ranks == 4
    test_groups_join.assert_close({names[name]: value for name, value in found.tensors.items()}, expected)


def apart() -> None:
    """``AssertionError`` unless groups take steps of their own between exchanges."""
    with TemporaryDirectory() as folder:
        test_outer.test_a_group_is_not_delayed_by_a_slow_one_before_the_exchange(Path(folder))


JOINS = partial(as_the_other_group, 3)
COPY_OF_GROUPS = "features.outer_steps.state:load_copy"
COPIED = "copied = copied_pieces(stored, optimizer, outer, reader.state[GROUP])"
LOADING, STEPS = "training.loading:load_state", "training.loading:_finish_optimizer"
IN_RECOVERY = (
    # The state.
    RecoveryDefect(
        "second moments are not restored",
        LOADING,
        argument("fill_together", 0, "[piece for piece in OLD if 'exp_avg_sq' not in piece.name]"),
        IN_PLACE,
    ),
    RecoveryDefect(
        "the step count of the optimizer starts again",
        STEPS,
        argument("set_steps_taken", 0, "0"),
        BEFORE_LAST,
    ),
    RecoveryDefect(
        "the samples of a step are repeated after the layout has changed",
        "training.loading:counters",
        argument("TrainState", None, "OLD | {'consumed_samples': reader.state['consumed_samples'] - 8}"),
        FEWER,
    ),
    RecoveryDefect(
        "the samples of a step are skipped",
        "training.loading:counters",
        argument("TrainState", None, "OLD | {'consumed_samples': reader.state['consumed_samples'] + 8}"),
        IN_PLACE,
    ),
    RecoveryDefect(
        "the weights are not those of the copy",
        LOADING,
        call("list", "[]", number=1),
        IN_PLACE,
    ),
    # The copies.
    RecoveryDefect(
        "parts of other ranks are read from the beginning of their copies",
        "resilience.state_copies:_Stored.span",
        attribute("offset", "0"),
        FEWER,
    ),
    RecoveryDefect(
        "only the first copy has tensors",
        "resilience.state_copies:CopyWriter.write",
        call("_foreach_copy_", "self._memory.copies() or OLD"),
        IN_PLACE,
    ),
    RecoveryDefect(
        "a copy is complete before its tensors are",
        "resilience.processes.memory:HostMemory.begin",
        without_call("_set"),
        test_host_copy.test_a_copy_that_was_not_completed_leaves_the_other_intact,
    ),
    RecoveryDefect(
        "the newest copy is replaced instead of the older one",
        "resilience.processes.memory:HostMemory.begin",
        expression("min", "max"),
        test_host_copy.test_the_chosen_copy_is_not_the_next_one_to_be_replaced,
    ),
    RecoveryDefect(
        "copies of discarded steps remain",
        "resilience.processes.memory:HostMemory.choose",
        call("_set", "self._slot_of(copy)"),
        test_host_copy.test_another_process_reads_the_two_newest_copies,
    ),
    RecoveryDefect(
        "a rollback does not replace the copies before it",
        "resilience.processes.memory:Copy.stamp",
        returned("(self.generation << 48) + 0 + self.iteration + 1"),
        test_host_copy.test_copies_after_a_rollback_are_newer,
    ),
    # The rendezvous.
    RecoveryDefect(
        "copies of wrong values count",
        "resilience.processes.rendezvous:Rendezvous._count",
        expression("iteration >= first", "iteration > first"),
        test_rendezvous.test_copies_of_wrong_values_do_not_count,
    ),
    RecoveryDefect(
        "copies before a rollback count",
        "resilience.processes.rendezvous:Rendezvous._count",
        attribute("rollbacks", "0"),
        test_rendezvous.test_copies_after_a_rollback_count,
    ),
    RecoveryDefect(
        "the newest copy of any rank counts, not the newest common one",
        "resilience.processes.rendezvous:Rendezvous._count",
        attribute("iteration", "max((number[1] for number in copies))", number=1),
        IN_COPY,
    ),
    RecoveryDefect(
        "a rank is left out of the meeting",
        "resilience.processes.rendezvous:Rendezvous.absent",
        argument("range", 0, "OLD - 1"),
        test_rendezvous.test_members_are_decided_once_with_the_newest_common_iteration,
    ),
    RecoveryDefect(
        "copies of two layouts are mixed",
        "resilience.processes.rendezvous:Rendezvous._count",
        expression(
            "chosen and writers is not None and self._choice.suffices(writers.training, owners, chosen)",
            "chosen and writers is not None",
        ),
        test_rendezvous.test_copies_of_two_layouts_are_not_mixed,
    ),
    RecoveryDefect(
        "lost state is a new start",
        "resilience.processes.rendezvous:Rendezvous._count",
        argument("Members", 2, "NO_STATE", number=2),
        test_rendezvous.test_state_without_a_copy_is_not_replaced_by_a_new_start,
    ),
    RecoveryDefect(
        "the memory of a dead rank is forgotten",
        "resilience.processes.rendezvous:Rendezvous._count",
        expression("f'held/{rank}'", "''"),
        test_rendezvous.test_a_lost_rank_is_not_awaited_and_its_memory_is_used,
    ),
    RecoveryDefect(
        "a rank that has joined is still lost",
        "resilience.processes.rendezvous:Rendezvous.take_in",
        expression("(f'joins/{rank}', f'left/{rank}', f'lost/{rank}')", "(f'joins/{rank}', f'left/{rank}')"),
        test_rendezvous.test_a_rank_that_joins_is_expected_at_the_next_meeting,
    ),
    RecoveryDefect(
        "one replica of sharded state is enough",
        "resilience.recovery_choice:has_all_parts",
        expression("axis not in ('dp', 'cp') or not is_whole", "axis not in ('dp', 'cp') and is_whole"),
        partial(test_rendezvous.test_copies_that_are_the_whole_state, "dp2 zero1", (0,), False),
    ),
    RecoveryDefect(
        "mirrors are not used",
        "resilience.processes.rendezvous:Rendezvous._count",
        argument("map", 1, "[number for number in OLD if number[0] == rank]"),
        WITHOUT_HOST,
    ),
    # Groups of replicas.
    RecoveryDefect(
        "the outer momentum is not restored",
        COPY_OF_GROUPS,
        statement(
            "reader.fill(copied_pieces(stored, optimizer, outer, reader.state[GROUP]))",
            "copied = copied_pieces(stored, optimizer, outer, reader.state[GROUP]); reader.fill("
            "piece for piece in copied if 'outer.momentum' not in piece.name)",
        ),
        IN_GROUP,
    ),
    RecoveryDefect(
        "global weights are not restored",
        COPY_OF_GROUPS,
        statement(
            "reader.fill(copied_pieces(stored, optimizer, outer, reader.state[GROUP]))",
            "copied = copied_pieces(stored, optimizer, outer, reader.state[GROUP]); reader.fill("
            "piece for piece in copied if 'outer.weights' not in piece.name)",
        ),
        IN_GROUP,
    ),
    RecoveryDefect(
        "an outer gradient that was in flight is sent again as zeros",
        COPY_OF_GROUPS,
        argument("send", 1, "torch.zeros_like(SELF)"),
        IN_FLIGHT,
    ),
    RecoveryDefect(
        "the other groups wait for the lost one",
        "resilience.recovery_choice:with_groups",
        argument("replace", "outer_groups", "config.num_groups"),
        without_the_lost_group,
    ),
    RecoveryDefect(
        "the state of a lost group is needed",
        "resilience.recovery_choice:_ranks_of_groups",
        expression("set(ranks) <= set(alive)", "set(ranks) & set(alive)"),
        without_the_lost_group,
    ),
    RecoveryDefect(
        "a group that joins starts with the weights of another one",
        "features.outer_steps.optimizer:OuterOptimizer.start_from_global_weights",
        call("copy_", "FIRST"),
        JOINS,
    ),
    RecoveryDefect(
        "a group that joins sends the outer gradient of another one again",
        "features.outer_steps.optimizer:OuterOptimizer.start_from_global_weights",
        call("zeros_like", "FIRST"),
        JOINS,
    ),
    RecoveryDefect(
        "a group that joins needs a state of its own",
        "resilience.recovery_choice:has_all_groups",
        expression("set(training) & set(ranks)", "set(training)"),
        JOINS,
    ),
    RecoveryDefect(
        "groups report to one another in every step",
        "training.driver:read_reports",
        condition("group.size() == 1"),
        partial(test_outer.test_four_steps_send_the_weights_once, "full", 1.0),
    ),
    RecoveryDefect(
        "groups have different step counts after one of them has skipped a step",
        "training.step:train_on_batches",
        expression("outcome.skipped and alone", "False"),
        apart,
    ),
    RecoveryDefect(
        "a step that one group skips delays its learning rates",
        "training.step:train_on_batches",
        argument("_advance", "skipped", "outcome.skipped"),
        apart,
    ),
)
