"""Choice of the ranks that train after a failure, and of the copies that form the whole state."""

from collections.abc import Collection, Sequence
from dataclasses import replace

from megatron_core.config import RunConfig
from megatron_core.config.validate import largest_world_size, problems
from megatron_core.features.outer_steps.settings import OuterConfig
from megatron_core.parallel.configured import grid_of
from megatron_core.parallel.grid import DENSE_AXES
from megatron_core.parallel.meter import unix_time
from megatron_core.parallel.texts import listed
from megatron_core.resilience.processes.rendezvous import ChoiceRules, Failure, Members
from megatron_core.resilience.settings import RecoveryConfig


def choice_of(config: RunConfig, size: int) -> ChoiceRules:
    """The rules of a job of ``size`` ranks for its rendezvous."""
    return ChoiceRules(
        training=lambda alive: training_ranks(config, size, alive),
        suffices=lambda ranks, owners, training: (
            has_all_groups(ranks, owners, training)
            if config.optional("outer_steps")
            else has_all_parts(config, ranks, owners)
        ),
    )


def training_ranks(config: RunConfig, size: int, alive: Collection[int]) -> tuple[int, ...]:
    """The ranks of the launcher that train: as many data-parallel replicas as the batch can be split over.

    Complete replicas of the layout of all ``size`` ranks come first; if there are too few, ranks of others form
    further ones. Empty if the ranks are too few for one replica, or for the ranks over which experts are split.
    With outer groups: those of as many complete groups as the batch can be split over.
    """
    if len(alive) == size:
        return tuple(range(size))
    if config.optional("outer_steps"):
        return _ranks_of_groups(config, size, alive)
    replica_size = config.parallel.smallest_world_size
    if len(alive) < replica_size:
        return ()
    wanted = largest_world_size(config, len(alive) // replica_size * replica_size)
    grid = grid_of(config.parallel, size)
    replicas: dict[int, list[int]] = {}
    for rank in sorted(alive):
        replicas.setdefault(grid.coordinates(rank)["dp"], []).append(rank)
    ordered = sorted(replicas.values(), key=lambda ranks: -len(ranks))
    return tuple(sorted([rank for ranks in ordered for rank in ranks][:wanted]))


def _ranks_of_groups(config: RunConfig, size: int, alive: Collection[int]) -> tuple[int, ...]:
    group_size = size // config.num_groups
    groups = [range(first, first + group_size) for first in range(0, size, group_size)]
    complete = [ranks for ranks in groups if set(ranks) <= set(alive)]
    for count in range(len(complete), 0, -1):
        if next(problems(with_groups(config, size, count * group_size), count * group_size), None) is None:
            return tuple(rank for ranks in complete[:count] for rank in ranks)
    return ()


def with_groups(config: RunConfig, size: int, count: int) -> RunConfig:
    """The ``config`` of a job of ``size`` ranks for ``count`` of them, with fewer outer groups of the same size."""
    if not config.optional("outer_steps"):
        return config
    outer = config.section(OuterConfig)
    return config.with_section(replace(outer, outer_groups=count * config.num_groups // size))


def groups_left_out(config: RunConfig, size: int, training: Collection[int]) -> list[int]:
    """The outer groups of a job of ``size`` ranks without ranks in ``training``; empty without groups."""
    if not config.optional("outer_steps"):
        return []
    group_size = size // config.num_groups
    return [group for group in range(config.num_groups) if group * group_size not in training]


def groups_that_join(config: RunConfig, size: int, members: Members) -> dict[int, int]:
    """The outer groups that train without copies of their own, each with the group whose state they load: the next one
    that has copies, as in ``sources_of``."""
    if not config.optional("outer_steps") or not members.holders:
        return {}
    group_size = size // config.num_groups
    firsts = {rank // group_size * group_size for rank in members.training if rank not in members.holders}

    def source(first: int) -> int:
        return min(members.holders, key=lambda owner: (owner - first) % size) // group_size

    return {first // group_size: source(first) for first in sorted(firsts)}


def describe_recovery(config: RunConfig, size: int, members: Members, failures: Sequence[Failure], joining: str) -> str:
    """Describe in one line ``failures`` and the recovery from them, or the start of ranks that join, as ``joining``
    says; ``size``: the number of ranks of the job."""
    sources = groups_that_join(config, size, members)
    starts = (f"; group {group} starts with the global weights and group {sources[group]}" for group in sources)
    states = "".join(f"{start}'s optimizer" for start in starts)
    continuing = f"{len(members.training)} of {size} ranks continue"
    if not failures and joining:
        return f"{joining}: {continuing} after iteration {members.iteration}{states}"
    seconds = unix_time() - failures[0].unix_seconds
    what = "; then ".join(failure.what for failure in failures)
    done = members.replacements
    if len(members.ranks) < size:
        done = continuing
        if left_out := groups_left_out(config, size, members.training):
            done += f" without group {listed(left_out)} of {config.num_groups}"
    since = f"after iteration {members.iteration}" if members.iteration >= 0 else "from the start"
    first = max(members.iteration, 0) + 1
    failed = failures[0].iteration
    repeats = f", repeating iteration {first}" + f" to {failed}" * (failed > first) if failed >= first else ""
    return f"recovered in {seconds:.1f} s: {what}; {done}{states}; training continues {since}{repeats}"


def has_all_groups(ranks: Collection[int], owners: Collection[int], training: Collection[int]) -> bool:
    """Whether the copies of ``owners``, written when ``ranks`` trained, have the state of all outer groups of
    ``training`` that trained then, and of one at least, with whose state the others start."""
    continuing = set(training) & set(ranks)
    return bool(continuing) and continuing <= set(owners)


def copies_are_whole(config: RunConfig) -> bool:
    """Whether each rank copies its whole state, so that any replica survives the loss of the others' memory.

    Otherwise it copies its part of a checkpoint, which is one of data-parallel size parts.
    """
    resilience = config.section(RecoveryConfig)
    parallel = config.parallel
    survives = resilience.recover_without_spare and not resilience.recover_mirror
    survives = survives and not config.optional("outer_steps")  # a lost group is left out with its state
    is_copied = parallel.dp_zero_stage == 0 and not config.optimizer.has_matrix_state
    return survives and is_copied and parallel.expert_model_parallel_size == 1


def has_all_parts(config: RunConfig, ranks: Sequence[int], owners: Collection[int]) -> bool:
    """Whether the copies of ``owners`` contain every part of the state of a layout of ``ranks``."""
    grid = grid_of(config.parallel, len(ranks))
    is_whole = copies_are_whole(config)
    axes = [axis for axis in DENSE_AXES if axis not in ("dp", "cp") or not is_whole]

    def part(index: int) -> tuple[int, ...]:
        return tuple(grid.coordinates(index)[axis] for axis in axes)

    all_parts = {part(index) for index in range(len(ranks))}
    return all_parts == {part(index) for index, rank in enumerate(ranks) if rank in owners}
