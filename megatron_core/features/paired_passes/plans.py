"""1F1B and interleaved 1F1B in pairs of a forward and a backward of different micro-batches."""

from megatron_core.schedules.actions import Plan, plan_of_turns, round_robin_stages
from megatron_core.schedules.table import interleaved_turns


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
    ranks = []
    for rank in range(num_ranks):
        ahead = 2 * (num_ranks - rank - 1) + (num_chunks - 1) * num_ranks + 1
        ranks.append(interleaved_turns(rank, num_ranks, num_chunks, num_microbatches, ahead))
    return plan_of_turns(ranks, round_robin_stages(num_ranks, num_chunks), num_microbatches)
