"""All pipeline schedules and their table. To add a schedule, write a function that returns a plan, and add a row.

p pipeline ranks, v chunks of layers on each, m micro-batches; F, B, I and W are the times of a rank's forward, whole
backward, input gradient and weight gradient.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from megatron_core.errors import ConfigError
from megatron_core.schedules.actions import (
    Action,
    Plan,
    plan_of_turns,
    round_robin_stages,
    v_shaped_stages,
)


def gpipe(num_ranks: int, num_microbatches: int) -> Plan:
    """GPipe: all forwards, then all backwards; every rank stores activations of all m micro-batches.

    Bubble (p - 1) / (m + p - 1). Source: Huang et al. 2019, "GPipe", section 2.3. Backwards run in the order of the
    forwards, not in reverse, so that gradients are summed in the same order under every schedule.
    """
    micros = range(num_microbatches)
    ranks = tuple(
        tuple(Action(rank, action_kind, micro) for action_kind in "FB" for micro in micros) for rank in range(num_ranks)
    )
    return Plan(ranks, round_robin_stages(num_ranks, 1))


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
    return _interleaved(num_ranks, num_chunks, num_microbatches, paired=False)


def paired_one_f_one_b(num_ranks: int, num_microbatches: int) -> Plan:
    """1F1B in pairs: rank r runs 2 (p - r) - 1 forwards ahead, then pairs of a forward and a B of another micro-batch.

    It stores activations of at most 2 (p - r) micro-batches: a pair needs the messages of both neighbours at once,
    which takes a second forward ahead for each later rank, and the pair itself one more.
    """
    return paired_interleaved(num_ranks, 1, num_microbatches)


def paired_interleaved(num_ranks: int, num_chunks: int, num_microbatches: int) -> Plan:
    """Interleaved 1F1B in pairs, with one more forward ahead than ``interleaved``.

    Source: Megatron-LM's schedule with --overlap-moe-expert-parallel-comm.
    """
    return _interleaved(num_ranks, num_chunks, num_microbatches, paired=True)


def _interleaved(num_ranks: int, num_chunks: int, num_microbatches: int, *, paired: bool) -> Plan:
    # Groups of p keep every rank busy in its turn: the chunks of a rank follow each other after p micro-batches.
    full = -(-num_microbatches // num_ranks) * num_ranks if num_chunks > 1 else num_microbatches
    ranks = []
    for rank in range(num_ranks):
        forwards = _chunk_order(rank, num_ranks, num_chunks, full, "F")
        backwards = _chunk_order(rank, num_ranks, num_chunks, full, "B")
        # As many as a micro-batch needs to reach the last stage and return while this rank has work.
        ahead = num_ranks - rank - 1
        if num_chunks > 1 or paired:
            ahead = 2 * ahead + (num_chunks - 1) * num_ranks + paired
        turns = _alternate(forwards, backwards, ahead)
        ranks.append(_without_surplus(turns if paired else _one_by_one(turns), num_microbatches))
    return plan_of_turns(ranks, round_robin_stages(num_ranks, num_chunks))


def _one_by_one(turns: Iterable[tuple[Action, ...]]) -> Iterator[tuple[Action, ...]]:
    return ((action,) for turn in turns for action in turn)


def _without_surplus(turns: Iterable[tuple[Action, ...]], num_microbatches: int) -> list[tuple[Action, ...]]:
    """Remove the actions of surplus micro-batches; the other action of a pair remains."""
    left = (tuple(action for action in turn if action.micro < num_microbatches) for turn in turns)
    return [turn for turn in left if turn]


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

    def time(action: Action) -> int:
        group, number = divmod(action.micro, num_ranks)
        return action.stage + (2 * action.micro if v_shaped else group * num_ranks * num_chunks + number)

    stages = [[stage for stage, rank in enumerate(stage_to_rank) if rank == this] for this in range(num_ranks)]
    actions = ([Action(s, "F", micro) for s in mine for micro in range(num_microbatches)] for mine in stages)
    return Plan(tuple(tuple(sorted(mine, key=time)) for mine in actions), stage_to_rank)


def _chunk_order(rank: int, num_ranks: int, num_chunks: int, num_microbatches: int, action_kind: str) -> list[Action]:
    """Order one rank's forwards or backwards: p micro-batches of a chunk, then the next chunk (B: last chunk first)."""
    chunks = range(num_chunks) if action_kind == "F" else range(num_chunks - 1, -1, -1)
    return [
        Action(chunk * num_ranks + rank, action_kind, micro)
        for group in range(0, num_microbatches, num_ranks)
        for chunk in chunks
        for micro in range(group, min(group + num_ranks, num_microbatches))
    ]


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[tuple[Action, ...]]:
    """``ahead`` forwards, then pairs of a forward and a backward, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    pairs = zip(forwards[ahead:], backwards[:steady], strict=True)
    return [*((action,) for action in forwards[:ahead]), *pairs, *((action,) for action in backwards[steady:])]


# ZB-H1 and ZB-H2: 1F1B with split backwards, whose weight gradients fill the bubble. Source: Qi et al. 2023, "Zero
# Bubble Pipeline Parallelism" (arXiv 2401.10241), sections 2.1 and 2.2: the handcrafted schedules.


def zb_h1(num_ranks: int, num_microbatches: int) -> Plan:
    """ZB-H1: the forwards of 1F1B; rank r delays weight gradients by r micro-batches.

    Every rank stores activations of at most p micro-batches, as rank 0 of 1F1B; the bubble takes (p - 1) (F + I - W).
    """
    return _late_weights(num_ranks, num_microbatches, 1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Plan:
    """ZB-H2: twice as many forwards ahead as 1F1B; rank r delays weight gradients by 2r micro-batches.

    Every rank stores activations of at most 2p - 1 micro-batches; the bubble takes (p - 1) (F + I - 2W), which is 0 if
    F = I = W. Ranks begin and end at different times, so the optimizer's step must not wait for all ranks.
    """
    return _late_weights(num_ranks, num_microbatches, 2)


def _late_weights(num_ranks: int, num_microbatches: int, factor: int) -> Plan:
    """``factor`` (p - r - 1) forwards ahead, then F I W in turn, with W delayed by ``factor`` r micro-batches."""
    ranks = []
    for rank in range(num_ranks):
        ahead = factor * (num_ranks - rank - 1)
        late = factor * rank
        turns: list[tuple[str, int]] = [("F", micro) for micro in range(ahead)]
        for micro in range(num_microbatches + late):
            turns += [("F", micro + ahead), ("I", micro), ("W", micro - late)]
        ranks.append(
            tuple(Action(rank, action_kind, micro) for action_kind, micro in turns if 0 <= micro < num_microbatches)
        )
    return Plan(tuple(ranks), round_robin_stages(num_ranks, 1))


# ZB-V and DualPipeV: two chunks on each rank, placed as a V: rank r holds stages r and 2p - 1 - r. The first rank holds
# the first and the last stage, so a micro-batch's backward begins on the rank on which its forward ended. Both need
# m >= 2p micro-batches; for fewer, the plan is made for 2p, and the surplus micro-batches are removed.

Turn = tuple[str, int]
"""Kind and chunk (0: first half of the V, ranks 0 to p - 1; 1: second half, ranks p - 1 to 0) of an action.

Its micro-batch is the next one of that kind and chunk. ``F&`` is a forward that is paired with the following B.
"""


def zb_v(num_ranks: int, num_microbatches: int) -> Plan:
    """ZB-V: no bubble if F = I = W; a rank stores activations of at most p micro-batches, as rank 0 of 1F1B.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): V-ZB.
    """
    full = max(num_microbatches, 2 * num_ranks)
    return _v_plan([_zb_v_turns(num_ranks, rank, full) for rank in range(num_ranks)], num_microbatches)


def dualpipe_v(num_ranks: int, num_microbatches: int, *, paired: bool = False) -> Plan:
    """DualPipeV: pairs of a forward of one chunk and a backward of the other; the first and last backwards are split.

    A rank stores activations of at most 2p + 1 micro-batches of one chunk. With ``paired``, the bubble takes
    (p - 1) (F&B + B - 3W) if F = I, where F&B is the time of a pair, and all are times of one chunk. Otherwise the
    actions of a pair run one after the other; if F = I = W the bubble then takes (p - 1) F.
    """
    # Source: DeepSeek-V3 technical report (arXiv 2412.19437), section 3.2.1 and table 2, and DualPipe's README;
    # the V by Sea AI Lab (huggingface.co/blog/ufotalent/cut-in-half).
    full = max(num_microbatches, 2 * num_ranks)
    turns = [_dualpipe_v_turns(num_ranks, rank, full) for rank in range(num_ranks)]
    return _v_plan(turns, num_microbatches, paired=paired)


def paired_dualpipe_v(num_ranks: int, num_microbatches: int) -> Plan:
    """``dualpipe_v`` in pairs."""
    return dualpipe_v(num_ranks, num_microbatches, paired=True)


def _zb_v_turns(num_ranks: int, rank: int, micros: int) -> Iterator[Turn]:
    """Warm-up of both chunks, then F I W of both chunks in turn, then a cool-down with the delayed weight gradients."""
    yield from [("F", 0)] * (2 * (num_ranks - rank) - 1)
    yield from [("F", 1), ("F", 0)] * rank
    yield from [("F", 1), ("I", 1), ("W", 1)] * (num_ranks - rank)
    forwards = micros - (2 * num_ranks - 1 - rank)  # remaining forwards of chunk 0
    for turn in range(micros - num_ranks):
        yield from [("F", 0)] * (turn < forwards)
        yield from [("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)]
    yield from [("I", 0), ("I", 1)] * rank
    yield from [("I", 0), ("W", 0)] * (num_ranks - rank)
    yield from [("W", 1)] * rank
    yield from [("W", 0)] * rank


def _dualpipe_v_turns(num_ranks: int, rank: int, micros: int) -> Iterator[Turn]:
    """The eight steps of DualPipeV; ``inner`` is the number of ranks between this one and the middle of the V.

    The first pair of the rank in the middle is not overlapped, so that its forward need not wait for the backward.
    """
    inner = num_ranks - rank - 1
    split = rank + 1
    yield from [("F", 0)] * (2 * inner)
    yield from [("F", 0), ("F", 1)] * (rank + 1)
    yield from [("I", 1), ("W", 1), ("F", 1)] * inner
    for turn in range(micros - 2 * num_ranks + rank + 1):
        yield from [("F&" if inner or turn else "F", 0), ("B", 1), ("F&", 1), ("B", 0)]
    yield from [("B", 1), ("F&", 1), ("B", 0)] * inner
    unpaired = [1, 0] * (rank + 1)  # chunks of the backwards without a paired forward; the second half is split
    yield from [("B", chunk) for chunk in unpaired[:split]]
    yield from [("I", chunk) for chunk in unpaired[split:]]
    late = [*unpaired[split:], *[0] * inner]  # weight gradients run in the order of their I
    for chunk in late[:inner]:
        yield from [("W", chunk), ("I", 0)]
    yield from [("W", chunk) for chunk in late[inner:]]


def _v_plan(turns: list[Iterator[Turn]], num_microbatches: int, *, paired: bool = False) -> Plan:
    """Make a plan of turns: number the micro-batches of each kind and chunk, and remove the surplus ones."""
    stage_to_rank = v_shaped_stages(len(turns))
    ranks = []
    for rank, mine in enumerate(turns):
        stages = (rank, len(stage_to_rank) - 1 - rank)
        seen: Counter[Turn] = Counter()
        split: dict[int, list[int]] = {0: [], 1: []}
        turns_of_rank: list[tuple[Action, ...]] = []
        joins = False
        for action_kind, chunk in mine:
            # Weight gradients run in the order of their input gradients, whose graphs they free.
            if action_kind == "W":
                micro = split[chunk].pop(0)
            else:
                side = ("F" if action_kind[0] == "F" else "B", chunk)
                micro = seen[side]
                seen[side] += 1
                if action_kind == "I":
                    split[chunk].append(micro)
            action = Action(stages[chunk], action_kind[0], micro)
            if joins:
                turns_of_rank[-1] += (action,)
            else:
                turns_of_rank.append((action,))
            joins = paired and action_kind == "F&"
        ranks.append(_without_surplus(turns_of_rank, num_microbatches))
    return plan_of_turns(ranks, stage_to_rank)


@dataclass(frozen=True)
# A row for each, so that help texts, the planner and the tests list the same schedules.
class Schedule:
    """A schedule of the table."""

    make: Callable[..., Plan]
    """``make(p, m)`` if ``chunks`` is a number, ``make(p, v, m)`` if it is None."""
    chunks: int | None
    """Required number of chunks on each rank; None: any number."""
    splits_backward: bool
    """Whether some backwards are split into I and W."""
    source: str
    """Publication."""
    make_paired: Callable[..., Plan] | None = None
    """As ``make``, with pairs of a forward and a backward whose communication overlaps; None: there are none."""


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, 1, False, "Huang et al. 2019, GPipe"),
    "1f1b": Schedule(
        one_f_one_b, 1, False, "Narayanan et al. 2019, PipeDream; 2021, PipeDream-2BW", paired_one_f_one_b
    ),
    "interleaved": Schedule(interleaved, None, False, "Narayanan et al. 2021, arXiv 2104.04473", paired_interleaved),
    "zb_h1": Schedule(zb_h1, 1, True, "Qi et al. 2023, arXiv 2401.10241"),
    "zb_h2": Schedule(zb_h2, 1, True, "Qi et al. 2023, arXiv 2401.10241"),
    "zb_v": Schedule(zb_v, 2, True, "Qi et al. 2024, arXiv 2405.15362"),
    "dualpipe_v": Schedule(
        dualpipe_v, 2, True, "DeepSeek-AI 2024, arXiv 2412.19437; DualPipe's README", paired_dualpipe_v
    ),
    "forward_only": Schedule(forward_only, None, False, "evaluation and generation"),
}


TRAINING = tuple(name for name in SCHEDULES if name != "forward_only")
"""Names of the schedules for training."""


PAIRED = tuple(name for name, schedule in SCHEDULES.items() if schedule.make_paired is not None)
"""Names of the schedules that can run in pairs."""


def make_plan(name: str, num_ranks: int, num_chunks: int, num_microbatches: int, *, paired: bool = False) -> Plan:
    """Make the plan of the schedule ``name`` for p ranks with v chunks each and m micro-batches.

    ``paired``: forwards run together with backwards of other micro-batches, so that communication overlaps.
    ``ConfigError`` for an unknown name, a number of chunks the schedule does not support, a size below 1, or a schedule
    without pairs.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline_schedule={name!r} is not a schedule; legal: {', '.join(SCHEDULES)}")
    sizes = {"pipeline size": num_ranks, "chunks of a rank": num_chunks, "micro-batches": num_microbatches}
    for what, size in sizes.items():
        if size < 1:
            raise ConfigError(f"pipeline_schedule={name}: {what} = {size}; legal: 1 or more")
    schedule = SCHEDULES[name]
    make = schedule.make_paired if paired else schedule.make
    if make is None:
        raise ConfigError(f"pipeline_schedule={name} has no pairs of forward and backward; legal: {', '.join(PAIRED)}")
    if schedule.chunks is None:
        return make(num_ranks, num_chunks, num_microbatches)
    if num_chunks != schedule.chunks:
        fitting = [other for other, row in SCHEDULES.items() if row.chunks in (None, num_chunks)]
        raise ConfigError(
            f"pipeline_schedule={name} cannot have {num_chunks} chunks on each rank; legal: {schedule.chunks}. "
            f"With {num_chunks}: {', '.join(fitting)}"
        )
    return make(num_ranks, num_microbatches)
