"""Plans of GPipe, ZB-H1, ZB-H2, ZB-V and DualPipeV; the symbols are those of ``schedules.table``."""

from collections import Counter
from collections.abc import Iterator

from megatron_core.schedules.actions import Action, Plan, plan_of_turns, round_robin_stages, v_shaped_stages


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
    for rank, turns_in_v in enumerate(turns):
        stages = (rank, len(stage_to_rank) - 1 - rank)
        seen: Counter[Turn] = Counter()
        # Micro-batches whose I has run, by chunk, for the W that follow.
        split: dict[int, list[int]] = {0: [], 1: []}
        turns_of_rank: list[tuple[Action, ...]] = []
        joins = False
        for action_kind, chunk in turns_in_v:
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
        ranks.append(turns_of_rank)
    return plan_of_turns(ranks, stage_to_rank, num_microbatches)
