"""Pipeline schedules, each a function that yields the ranks' lists of actions.

p pipeline ranks, v chunks of layers on each, m micro-batches.
"""

from __future__ import annotations

from megatron_core.pipeline_parallel.actions import Action, Plan, placed_round_robin


def one_f_one_b(num_ranks: int, num_microbatches: int) -> Plan:
    """1F1B: rank r runs p - r - 1 forwards ahead, then one forward and one backward in turn.

    It holds activations of at most p - r micro-batches. Source: Narayanan et al. 2019 (PipeDream), section 3.2,
    with the flush of Narayanan et al. 2021 (PipeDream-2BW).
    """
    return interleaved(num_ranks, 1, num_microbatches)


def interleaved(num_ranks: int, num_chunks: int, num_microbatches: int) -> Plan:
    """Interleaved 1F1B: micro-batches go through the chunks in groups of p (Narayanan et al. 2021, section 2.2).

    If p does not divide m, the plan is that of the next multiple with the surplus micro-batches left out: an order
    that respects all dependencies still does when some micro-batches are taken out of it.
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


def forward_only(num_ranks: int, num_chunks: int, num_microbatches: int) -> Plan:
    """Forwards alone, in the order of the interleaved schedule: for evaluation."""
    full = -(-num_microbatches // num_ranks) * num_ranks if num_chunks > 1 else num_microbatches
    orders = (_chunk_order(rank, num_ranks, num_chunks, full, "F") for rank in range(num_ranks))
    ranks = tuple(tuple(action for action in order if action.micro < num_microbatches) for order in orders)
    return Plan(ranks, placed_round_robin(num_ranks, num_chunks))


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
