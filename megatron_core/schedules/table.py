"""All pipeline schedules, and the table of them. To add one: a function that yields a plan, and a row.

p pipeline ranks, v chunks of layers on each, m micro-batches; F, B, I and W are the times of a rank's forward, whole
backward, input gradient and weight gradient.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatron_core.errors import ConfigError
from megatron_core.schedules.actions import Action, Plan, round_robin_stages, v_shaped_stages


def gpipe(num_ranks: int, num_microbatches: int) -> Plan:
    """GPipe: all forwards, then all backwards; every rank holds all m micro-batches.

    Bubble (p - 1) / (m + p - 1). Source: Huang et al. 2019, "GPipe", section 2.3. Backwards run in the order of the
    forwards, not in reverse, so that gradients are summed in the same order under every schedule.
    """
    micros = range(num_microbatches)
    ranks = tuple(tuple(Action(rank, kind, micro) for kind in "FB" for micro in micros) for rank in range(num_ranks))
    return Plan(ranks, round_robin_stages(num_ranks, 1))


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Plan:
    """1F1B: rank r runs p - r - 1 forwards ahead, then one forward and one backward in turn.

    It holds activations of at most p - r micro-batches; bubble (p - 1) / (m + p - 1). Source: Narayanan et al. 2019
    (PipeDream), section 3.2, with the flush of Narayanan et al. 2021 (PipeDream-2BW).
    """
    return interleaved(num_ranks, 1, num_microbatches)


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int) -> Plan:
    """Interleaved 1F1B: micro-batches go through the chunks in groups of p (Narayanan et al. 2021, section 2.2).

    Bubble (p - 1) / (v m + p - 1) if p divides m. If it does not, the plan is that of the next multiple with the
    surplus micro-batches left out: an order that respects all dependencies still does when some micro-batches are
    taken out of it.
    """
    full = -(-num_microbatches // num_ranks) * num_ranks if num_chunks > 1 else num_microbatches
    ranks = []
    for rank in range(num_ranks):
        forwards = _chunk_order(rank, num_ranks, num_chunks, full, "F")
        backwards = _chunk_order(rank, num_ranks, num_chunks, full, "B")
        ahead = num_ranks - rank - 1
        if num_chunks > 1:
            ahead = 2 * ahead + (num_chunks - 1) * num_ranks
        actions = _alternate(forwards, backwards, ahead)
        ranks.append(tuple(action for action in actions if action.micro < num_microbatches))
    return Plan(tuple(ranks), round_robin_stages(num_ranks, num_chunks))


def forward_only(
    num_ranks: int, num_chunks: int, num_microbatches: int, *, stage_to_rank: tuple[int, ...] | None = None
) -> Plan:
    """Forwards alone, for evaluation and generation, in the order of the interleaved schedule.

    Micro-batch i enters at a time t_i and is on stage s at t_i + s; each rank sorts by that time, which respects all
    dependencies for any ``stage_to_rank`` (default: round robin). No two stages of a rank fall on the same time with
    t_i = floor(i / p) p v + i mod p on stages that go round, and with t_i = 2 i on a V.
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


def _chunk_order(rank: int, num_ranks: int, num_chunks: int, num_microbatches: int, kind: str) -> list[Action]:
    """One rank's forwards or backwards: p micro-batches through a chunk, then the next chunk (B: from the last)."""
    chunks = range(num_chunks) if kind == "F" else range(num_chunks - 1, -1, -1)
    return [
        Action(chunk * num_ranks + rank, kind, micro)
        for group in range(0, num_microbatches, num_ranks)
        for chunk in chunks
        for micro in range(group, min(group + num_ranks, num_microbatches))
    ]


def _alternate(forwards: list[Action], backwards: list[Action], ahead: int) -> list[Action]:
    """``ahead`` forwards, then forward and backward in turn, then the backwards that are left."""
    ahead = min(ahead, len(forwards))
    steady = len(forwards) - ahead
    pairs = zip(forwards[ahead:], backwards[:steady], strict=True)
    return [*forwards[:ahead], *(action for pair in pairs for action in pair), *backwards[steady:]]


# ZB-H1 and ZB-H2: 1F1B with split backwards, whose weight gradients fill the bubble. Source: Qi et al. 2023, "Zero
# Bubble Pipeline Parallelism" (arXiv 2401.10241), sections 2.1 and 2.2: the schedules made by hand.


def zb_h1(num_ranks: int, num_microbatches: int) -> Plan:
    """ZB-H1: 1F1B's forwards, and rank r's weight gradients r micro-batches late.

    Every rank holds at most p micro-batches, as 1F1B's first one does; the bubble takes (p - 1) (F + I - W).
    """
    return _late_weights(num_ranks, num_microbatches, 1)


def zb_h2(num_ranks: int, num_microbatches: int) -> Plan:
    """ZB-H2: twice as many forwards ahead, and rank r's weight gradients 2r micro-batches late.

    Every rank holds at most 2p - 1 micro-batches; the bubble takes (p - 1) (F + I - 2W), nothing if F = I = W. Ranks
    then begin and end one after the other, so that the optimizer's step must not wait for all of them.
    """
    return _late_weights(num_ranks, num_microbatches, 2)


def _late_weights(num_ranks: int, num_microbatches: int, factor: int) -> Plan:
    """``factor`` (p - r - 1) forwards ahead, then F I W in turn with the W ``factor`` r micro-batches late."""
    ranks = []
    for rank in range(num_ranks):
        ahead, late = factor * (num_ranks - rank - 1), factor * rank
        turns: list[tuple[str, int]] = [("F", micro) for micro in range(ahead)]
        for micro in range(num_microbatches + late):
            turns += [("F", micro + ahead), ("I", micro), ("W", micro - late)]
        ranks.append(tuple(Action(rank, kind, micro) for kind, micro in turns if 0 <= micro < num_microbatches))
    return Plan(tuple(ranks), round_robin_stages(num_ranks, 1))


# ZB-V and DualPipeV: two chunks on each rank, placed as a V: rank r holds stages r and 2p - 1 - r. The first rank holds
# the first and the last stage, so a micro-batch's backward begins where its forward ended. Both want m >= 2p
# micro-batches; for fewer, the plan is that of 2p with the surplus micro-batches left out.

Turn = tuple[str, int]
"""Kind and chunk (0 goes down the ranks, 1 comes back up); its micro-batch is the next one of that kind and chunk."""


def zb_v(num_ranks: int, num_microbatches: int) -> Plan:
    """ZB-V: no bubble if F = I = W, with the activations of 1F1B's first rank: p micro-batches.

    Source: Qi et al. 2024, "Pipeline Parallelism with Controllable Memory" (arXiv 2405.15362): V-ZB.
    """
    full = max(num_microbatches, 2 * num_ranks)
    return _v_plan([_zb_v_turns(num_ranks, rank, full) for rank in range(num_ranks)], num_microbatches)


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Plan:
    """DualPipeV: a forward of one chunk beside a backward of the other; the first and last are split.

    A rank holds at most 2p + 1 micro-batches of one chunk, p + 1/2 of its layers. The forward and the backward beside
    it stand one after the other here; if F = I = W the bubble takes (p - 1) F / 2. Source: DeepSeek-V3 technical
    report (arXiv 2412.19437), section 3.2.1, and DualPipe's README; cut in half by Sea AI Lab
    (huggingface.co/blog/ufotalent/cut-in-half).
    """
    full = max(num_microbatches, 2 * num_ranks)
    return _v_plan([_dualpipe_v_turns(num_ranks, rank, full) for rank in range(num_ranks)], num_microbatches)


def _zb_v_turns(num_ranks: int, rank: int, micros: int) -> Iterator[Turn]:
    """Fill the V, turn at its end, F I W of both chunks in turn, and keep weight gradients for the way out."""
    yield from [("F", 0)] * (2 * (num_ranks - rank) - 1)
    yield from [("F", 1), ("F", 0)] * rank
    yield from [("F", 1), ("I", 1), ("W", 1)] * (num_ranks - rank)
    forwards = micros - (2 * num_ranks - 1 - rank)  # of chunk 0, that are left
    for turn in range(micros - num_ranks):
        yield from [("F", 0)] * (turn < forwards)
        yield from [("I", 0), ("W", 0), ("F", 1), ("I", 1), ("W", 1)]
    yield from [("I", 0), ("I", 1)] * rank
    yield from [("I", 0), ("W", 0)] * (num_ranks - rank)
    yield from [("W", 1)] * rank
    yield from [("W", 0)] * rank


def _dualpipe_v_turns(num_ranks: int, rank: int, micros: int) -> Iterator[Turn]:
    """The eight steps of DualPipeV; ``inner`` ranks lie between this one and the V's turn."""
    inner, split = num_ranks - rank - 1, rank + 1
    yield from [("F", 0)] * (2 * inner)
    yield from [("F", 0), ("F", 1)] * (rank + 1)
    yield from [("I", 1), ("W", 1), ("F", 1)] * inner
    yield from [("F", 0), ("B", 1), ("F", 1), ("B", 0)] * (micros - 2 * num_ranks + rank + 1)
    yield from [("B", 1), ("F", 1), ("B", 0)] * inner
    last = [1, 0] * (rank + 1)  # chunks of backwards that no forward stands beside; the second half is split
    yield from [("B", chunk) for chunk in last[:split]]
    yield from [("I", chunk) for chunk in last[split:]]
    late = [*last[split:], *[0] * inner]  # weight gradients run in the order in which their I did
    for chunk in late[:inner]:
        yield from [("W", chunk), ("I", 0)]
    yield from [("W", chunk) for chunk in late[inner:]]


def _v_plan(turns: list[Iterator[Turn]], num_microbatches: int) -> Plan:
    """Number each kind's micro-batches, and leave the surplus ones out."""
    stage_to_rank = v_shaped_stages(len(turns))
    ranks = []
    for rank, mine in enumerate(turns):
        stages = (rank, len(stage_to_rank) - 1 - rank)
        seen: Counter[Turn] = Counter()
        split: dict[int, list[int]] = {0: [], 1: []}
        actions = []
        for kind, chunk in mine:
            if kind == "W":
                micro = split[chunk].pop(0)
            else:
                side = ("F" if kind == "F" else "B", chunk)
                micro = seen[side]
                seen[side] += 1
                if kind == "I":
                    split[chunk].append(micro)
            actions.append(Action(stages[chunk], kind, micro))
        ranks.append(tuple(action for action in actions if action.micro < num_microbatches))
    return Plan(tuple(ranks), stage_to_rank)


@dataclass(frozen=True)
class Schedule:
    """A row of the table."""

    make: Callable[..., Plan]
    """``make(p, m)`` if ``chunks`` is a number, ``make(p, v, m)`` if any number of chunks will do."""
    chunks: int | None
    """Chunks that each rank must hold; None: any number."""
    splits_backward: bool
    """Whether some backwards are an I and a W."""
    source: str
    """Where it was published."""


SCHEDULES: dict[str, Schedule] = {
    "gpipe": Schedule(gpipe, 1, False, "Huang et al. 2019, GPipe"),
    "1f1b": Schedule(one_f_one_b, 1, False, "Narayanan et al. 2019, PipeDream; 2021, PipeDream-2BW"),
    "interleaved": Schedule(interleaved, None, False, "Narayanan et al. 2021, arXiv 2104.04473"),
    "zb_h1": Schedule(zb_h1, 1, True, "Qi et al. 2023, arXiv 2401.10241"),
    "zb_h2": Schedule(zb_h2, 1, True, "Qi et al. 2023, arXiv 2401.10241"),
    "zb_v": Schedule(zb_v, 2, True, "Qi et al. 2024, arXiv 2405.15362"),
    "dualpipe_v": Schedule(dualpipe_v, 2, True, "DeepSeek-AI 2024, arXiv 2412.19437; DualPipe's README"),
    "forward_only": Schedule(forward_only, None, False, "evaluation and generation"),
}


TRAINING = tuple(name for name in SCHEDULES if name != "forward_only")
"""Names of the schedules that train."""


def make_plan(name: str, num_ranks: int, num_chunks: int, num_microbatches: int) -> Plan:
    """The plan of the schedule ``name`` for p ranks with v chunks each and m micro-batches.

    ``ConfigError`` for a name that is not in the table, chunks that the schedule cannot have, or a size below 1.
    """
    if name not in SCHEDULES:
        raise ConfigError(f"pipeline_schedule={name!r} is no schedule; legal: {', '.join(SCHEDULES)}")
    sizes = {"pipeline size": num_ranks, "chunks of a rank": num_chunks, "micro-batches": num_microbatches}
    for what, size in sizes.items():
        if size < 1:
            raise ConfigError(f"pipeline_schedule={name}: {what} = {size}; legal: 1 or more")
    schedule = SCHEDULES[name]
    if schedule.chunks is None:
        return schedule.make(num_ranks, num_chunks, num_microbatches)
    if num_chunks != schedule.chunks:
        fitting = [other for other, row in SCHEDULES.items() if row.chunks in (None, num_chunks)]
        raise ConfigError(
            f"pipeline_schedule={name} cannot have {num_chunks} chunks on each rank; legal: {schedule.chunks}. "
            f"With {num_chunks}: {', '.join(fitting)}"
        )
    return schedule.make(num_ranks, num_microbatches)
