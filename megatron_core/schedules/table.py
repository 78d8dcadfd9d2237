"""1F1B and interleaved 1F1B, which every run has, and the table of all schedules.

To add a schedule, write a function that returns a plan, and name it in a row of ``Feature.schedules``.

p pipeline ranks, v chunks of layers on each, m micro-batches; F, B, I and W are the times of a rank's forward, whole
backward, input gradient and weight gradient.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_core.errors import ConfigError
from megatron_core.feature import cached_for_features, features, load_hook
from megatron_core.schedules.actions import Action, Plan, plan_of_turns, round_robin_stages, v_shaped_stages


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Plan:
    """1F1B: rank r runs p - r - 1 forwards ahead, then one forward and one backward alternately.

    It stores activations of at most p - r micro-batches; bubble (p - 1) / (m + p - 1). Source: Narayanan et al. 2019
    (PipeDream), section 3.2, with the flush of Narayanan et al. 2021 (PipeDream-2BW).
    """
    return interleaved(num_ranks, 1, num_microbatches)


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int) -> Plan:
    """Interleaved 1F1B: micro-batches go through the chunks in groups of p (Narayanan et al. 2021, section 2.2).

    Bubble (p - 1) / (v m + p - 1) if p divides m. Otherwise the plan is made for the next multiple of p, and the
    surplus micro-batches are removed; removing micro-batches does not violate dependencies.
    """
    ranks = []
    for rank in range(num_ranks):
        # As many as a micro-batch needs to reach the last stage and return while this rank has work.
        ahead = num_ranks - rank - 1
        if num_chunks > 1:
            ahead = 2 * ahead + (num_chunks - 1) * num_ranks
        turns = interleaved_turns(rank, num_ranks, num_chunks, num_microbatches, ahead)
        ranks.append([(action,) for turn in turns for action in turn])
    return plan_of_turns(ranks, round_robin_stages(num_ranks, num_chunks), num_microbatches)


def interleaved_turns(
    rank: int, num_ranks: int, num_chunks: int, num_microbatches: int, ahead: int
) -> list[tuple[Action, ...]]:
    """``ahead`` forwards of a rank, then pairs of a forward and a backward, then the remaining backwards.

    With several chunks the micro-batches are rounded up to a multiple of p; ``plan_of_turns`` removes the surplus.
    """
    # Groups of p keep every rank busy in its turn: the chunks of a rank follow each other after p micro-batches.
    full = -(-num_microbatches // num_ranks) * num_ranks if num_chunks > 1 else num_microbatches
    forwards, backwards = (_chunk_order(rank, num_ranks, num_chunks, full, action_kind) for action_kind in "FB")
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    pairs = zip(forwards[ahead:], backwards[:steady], strict=True)
    return [*((action,) for action in forwards[:ahead]), *pairs, *((action,) for action in backwards[steady:])]


def _chunk_order(rank: int, num_ranks: int, num_chunks: int, num_microbatches: int, action_kind: str) -> list[Action]:
    """Order one rank's forwards or backwards: p micro-batches of a chunk, then the next chunk (B: last chunk first)."""
    chunks = range(num_chunks) if action_kind == "F" else range(num_chunks - 1, -1, -1)
    return [
        Action(chunk * num_ranks + rank, action_kind, micro)
        for group in range(0, num_microbatches, num_ranks)
        for chunk in chunks
        for micro in range(group, min(group + num_ranks, num_microbatches))
    ]


def forward_only(
    num_ranks: int, num_chunks: int, num_microbatches: int, *, stage_to_rank: tuple[int, ...] | None = None
) -> Plan:
    """Only forwards, for evaluation and generation, in the order of the interleaved schedule.

    Micro-batch i starts at a time t_i and is on stage s at t_i + s. Each rank sorts its actions by that time, which
    respects all dependencies for any ``stage_to_rank`` (default: round robin). With t_i = floor(i / p) p v + i mod p
    for round robin, and t_i = 2 i for a V, no two actions of a rank have the same time.
    """
    going_round = round_robin_stages(num_ranks, num_chunks)
    stage_to_rank = going_round if stage_to_rank is None else stage_to_rank
    v_shaped = stage_to_rank == v_shaped_stages(num_ranks) != going_round

    # A formula instead of a simulation: evaluation makes a plan for each number of micro-batches.
    def time(action: Action) -> int:
        group, number = divmod(action.micro, num_ranks)
        return action.stage + (2 * action.micro if v_shaped else group * num_ranks * num_chunks + number)

    stages = [
        [stage for stage, rank in enumerate(stage_to_rank) if rank == rank_of_stages]
        for rank_of_stages in range(num_ranks)
    ]
    actions = (
        [Action(s, "F", micro) for s in stages_of_rank for micro in range(num_microbatches)]
        for stages_of_rank in stages
    )
    return Plan(tuple(tuple(sorted(stages_of_rank, key=time)) for stages_of_rank in actions), stage_to_rank)


@dataclass(frozen=True)
# A row for each, so that help texts, the planner and the tests list the same schedules.
class Schedule:
    """A row of the table of schedules; ``Feature.schedules`` has the rows of features."""

    name: str
    """The value of --pipeline-schedule."""
    make: Callable[..., Plan] | str
    """``make(p, m)`` if ``chunks`` is a number, ``make(p, v, m)`` if it is None; or a hook that names the function."""
    chunks: int | None = None
    """Required number of chunks on each rank; None: any number."""
    splits_backward: bool = False
    """Whether some backwards are split into I and W."""
    in_pairs: bool = False
    """Whether it is the form of the schedule ``name`` in pairs: forwards run together with backwards of other
    micro-batches, so that communication overlaps."""


_OF_EVERY_RUN = (
    Schedule("1f1b", one_f_one_b, chunks=1),
    Schedule("interleaved", interleaved),
    Schedule("forward_only", forward_only),
)


@cached_for_features
def schedules(*, in_pairs: bool = False) -> Mapping[str, Schedule]:
    """All schedules by name, or their forms in pairs."""
    rows = (*_OF_EVERY_RUN, *(row for feature in features() for row in feature.schedules))
    return {row.name: row for row in rows if row.in_pairs == in_pairs}


def training_schedules() -> tuple[str, ...]:
    """Names of the schedules for training."""
    return tuple(name for name in schedules() if name != "forward_only")


def __getattr__(name: str) -> Any:
    """Tables of the version before, whose rows are now those of all features."""
    tables: dict[str, Callable[[], Any]] = {"SCHEDULES": schedules, "TRAINING": training_schedules}
    if name not in tables:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return tables[name]()


def make_plan(name: str, num_ranks: int, num_chunks: int, num_microbatches: int, *, paired: bool = False) -> Plan:
    """Make the plan of the schedule ``name`` for p ranks with v chunks each and m micro-batches.

    ``paired``: forwards run together with backwards of other micro-batches, so that communication overlaps.
    ``ConfigError`` for an unknown name, a number of chunks the schedule does not support, a size below 1, or a schedule
    without pairs.
    """
    if name not in schedules():
        raise ConfigError(f"pipeline_schedule={name!r} is not a schedule; legal: {', '.join(schedules())}")
    sizes = {"pipeline size": num_ranks, "chunks of a rank": num_chunks, "micro-batches": num_microbatches}
    for what, size in sizes.items():
        if size < 1:
            raise ConfigError(f"pipeline_schedule={name}: {what} = {size}; legal: 1 or more")
    rows = schedules(in_pairs=paired)
    if name not in rows:
        raise ConfigError(f"pipeline_schedule={name} has no pairs of forward and backward; legal: {', '.join(rows)}")
    schedule = rows[name]
    make: Callable[..., Plan] = load_hook(schedule.make) if isinstance(schedule.make, str) else schedule.make
    if schedule.chunks is None:
        return make(num_ranks, num_chunks, num_microbatches)
    if num_chunks != schedule.chunks:
        fitting = [other for other, row in schedules().items() if row.chunks in (None, num_chunks)]
        raise ConfigError(
            f"pipeline_schedule={name} cannot have {num_chunks} chunks on each rank; legal: {schedule.chunks}. "
            f"With {num_chunks}: {', '.join(fitting)}"
        )
    return make(num_ranks, num_microbatches)
