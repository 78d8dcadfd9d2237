"""Schedules whose backwards are whole: GPipe, 1F1B, interleaved 1F1B, and forwards alone.

p pipeline ranks, v chunks of layers on each, m micro-batches.
"""

from __future__ import annotations

from megatron_core.pipeline_parallel.actions import Action, Plan, placed_round_robin, placed_v


def gpipe(num_ranks: int, num_microbatches: int) -> Plan:
    """GPipe: all forwards, then all backwards; every rank holds all m micro-batches.

    Bubble (p - 1) / (m + p - 1). Source: Huang et al. 2019, "GPipe", section 2.3. Backwards run in the order of the
    forwards, not in reverse, so that gradients are summed in the same order under every schedule.
    """
    micros = range(num_microbatches)
    ranks = tuple(tuple(Action(rank, kind, micro) for kind in "FB" for micro in micros) for rank in range(num_ranks))
    return Plan(ranks, placed_round_robin(num_ranks, 1))


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
    return Plan(tuple(ranks), placed_round_robin(num_ranks, num_chunks))


def forward_only(
    num_ranks: int, num_chunks: int, num_microbatches: int, *, place: tuple[int, ...] | None = None
) -> Plan:
    """Forwards alone, for evaluation and generation, in the order of the interleaved schedule.

    Micro-batch i enters at a time t_i and is on stage s at t_i + s; each rank sorts by that time, which respects all
    dependencies for any ``place`` (default: round robin). No two stages of a rank fall on the same time with
    t_i = floor(i / p) p v + i mod p on stages that go round, and with t_i = 2 i on a V.
    """
    going_round = placed_round_robin(num_ranks, num_chunks)
    place = going_round if place is None else place
    v_shaped = place == placed_v(num_ranks) != going_round

    def time(action: Action) -> int:
        group, number = divmod(action.micro, num_ranks)
        return action.stage + (2 * action.micro if v_shaped else group * num_ranks * num_chunks + number)

    stages = [[stage for stage, rank in enumerate(place) if rank == this] for this in range(num_ranks)]
    actions = ([Action(s, "F", micro) for s in mine for micro in range(num_microbatches)] for mine in stages)
    return Plan(tuple(tuple(sorted(mine, key=time)) for mine in actions), place)


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
