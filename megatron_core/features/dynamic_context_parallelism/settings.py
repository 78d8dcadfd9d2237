"""Settings of context parallelism over a number of ranks that depends on the length."""

from dataclasses import dataclass

from megatron_core.config import ranges as r
from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import given, section, setting


@dataclass(frozen=True, kw_only=True)
@section()
class DynamicContextConfig(ParallelConfig):
    """Context parallelism of each document over as many ranks as its length needs."""

    dynamic_context_parallel: bool = setting(
        False, needs=given("max_seqlen_per_dp_cp_rank", "N"), aliases="hybrid_context_parallel"
    )
    """Compute each document of the packed samples on 1, 2, 4, ... of the dp x cp ranks: on the fewest of which each has
    at most --max-seqlen-per-dp-cp-rank of its tokens. The documents of a global batch are assigned so that the ranks
    have about equal work; the results are those of any other layout."""
    max_seqlen_per_dp_cp_rank: int | None = setting(
        None, r.COUNT, needs=given("dynamic_context_parallel"), aliases="max_seqlen_per_cp_rank"
    )
    """With --dynamic-context-parallel: the largest number of tokens of a document on one rank."""
    min_dynamic_context_parallel_size: int = setting(
        1, r.SMALL_COUNT, needs=given("dynamic_context_parallel"), is_refinement=True
    )
    """With --dynamic-context-parallel: the smallest number of ranks for a document, a power of 2."""


def divides_documents(config: RunConfig) -> bool:
    """Whether the number of ranks of a document depends on its length."""
    return config.parallel.section(DynamicContextConfig).dynamic_context_parallel
