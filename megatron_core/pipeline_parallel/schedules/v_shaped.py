"""ZB-V and DualPipeV: two chunks on each rank, placed as a V: rank r holds stages r and 2p - 1 - r.

The first rank holds the first and the last stage, so a micro-batch's backward begins where its forward ended. Both
want m >= 2p micro-batches; for fewer, the plan is that of 2p with the surplus micro-batches left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from megatron_core.pipeline_parallel.actions import Action, Plan, placed_v

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
    place = placed_v(len(turns))
    ranks = []
    for rank, mine in enumerate(turns):
        stages = (rank, len(place) - 1 - rank)
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
    return Plan(tuple(ranks), place)
