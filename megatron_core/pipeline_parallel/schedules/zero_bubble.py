"""ZB-H1 and ZB-H2: 1F1B with split backwards, whose weight gradients fill the bubble.

F, I and W are the times of a rank's forward, input gradient and weight gradient. Source: Qi et al. 2023, "Zero Bubble
Pipeline Parallelism" (arXiv 2401.10241), sections 2.1 and 2.2: the schedules made by hand.
"""

from __future__ import annotations

from megatron_core.pipeline_parallel.actions import Action, Plan, placed_round_robin


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
    return Plan(tuple(ranks), placed_round_robin(num_ranks, 1))
