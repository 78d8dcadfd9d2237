"""Settings of context parallelism other than its size, and their rules."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.rule_helpers import divisors, leaves_rest, unused
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import BY_RULE, Condition, section, setting

SEVERAL_RANKS = Condition("--context-parallel-size N", lambda run: run.parallel.context_parallel_size > 1)


@dataclass(frozen=True, kw_only=True)
@section()
class ContextParallelConfig(ParallelConfig):
    """Communication of attention over sequences that are split over ranks."""

    cp_comm_type: tuple[Literal["p2p", "all_gather", "a2a", "a2a+p2p"], ...] = setting(("p2p",), when=SEVERAL_RANKS)
    """Communication of attention over the CP ranks: one word, or one for each layer. p2p: keys and values are passed
    around a ring during the computation. all_gather: every rank gathers all keys and values. a2a: each rank computes
    some heads of the whole sequence. a2a+p2p: a2a within groups of neighbouring ranks, p2p between the groups."""
    hierarchical_context_parallel_sizes: tuple[int, ...] | None = setting(None, when=BY_RULE)
    """With --cp-comm-type a2a+p2p: size of an a2a group, and size of a ring; their product is the CP size."""

    @property
    def a2a_size(self) -> int:
        """Number of ranks that exchange heads with --cp-comm-type a2a+p2p."""
        return self.hierarchical_context_parallel_sizes[0] if self.hierarchical_context_parallel_sizes else 1


def context_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Heads and communication kinds that do not fit the context-parallel size."""
    parallel = config.parallel.section(ContextParallelConfig)
    cp, sizes = parallel.context_parallel_size, parallel.hierarchical_context_parallel_sizes
    if cp <= 1:
        if sizes is not None and set(sizes) != {1}:
            yield f"hierarchical_context_parallel_sizes={sizes} needs context_parallel_size={cp} above 1; give both"
        return
    if config.model.attention_backend == "flex" and set(parallel.cp_comm_type) != {"a2a"}:
        yield (
            f"context_parallel_size={cp} cannot be used with attention_backend=flex: it needs whole sequences; add "
            "--cp-comm-type a2a, or use --attention-backend auto"
        )
    kinds, layers = parallel.cp_comm_type, config.model.num_layers
    if len(kinds) not in (1, layers):
        yield (
            f"cp_comm_type={' '.join(kinds)} names {len(kinds)} kinds for num_layers={layers}; give one for all layers "
            "or one for each"
        )
    if "a2a+p2p" in kinds and (sizes is None or len(sizes) != 2 or prod(sizes) != cp or min(sizes) < 1):
        legal = ", ".join(f"{size} {cp // size}" for size in divisors(cp))
        yield (
            f"hierarchical_context_parallel_sizes={sizes} are not the two sizes (a2a, p2p) of cp_comm_type=a2a+p2p, "
            f"whose product is context_parallel_size={cp}; legal: {legal}"
        )
    elif sizes is not None and "a2a+p2p" not in kinds:
        way_out = "add --cp-comm-type a2a+p2p or remove it"
        yield unused("hierarchical_context_parallel_sizes", sizes, "cp_comm_type", " ".join(kinds), way_out)
    else:
        yield from _head_problems(config, parallel.cp_comm_type, {"a2a": cp, "a2a+p2p": parallel.a2a_size})
    if parallel.layout_invariant:
        yield from _copied_head_problems(config, parallel)


def _head_problems(config: RunConfig, kinds: Sequence[str], ranks: Mapping[str, int]) -> Iterator[str]:
    """Numbers of heads that cannot be exchanged evenly; ``ranks``: number of ranks that exchange heads, by kind."""
    heads, tp = config.model.num_attention_heads, max(config.parallel.tensor_model_parallel_size, 1)
    for cp_type in dict.fromkeys(kinds if config.model.may_have_attention else ()):
        if leaves_rest(heads // tp, ranks.get(cp_type, 1)):
            legal = ", ".join(map(str, divisors(heads // tp)))
            yield (
                f"cp_comm_type={cp_type} exchanges the {heads // tp} heads of a rank (num_attention_heads={heads} / "
                f"tensor_model_parallel_size={tp}) among {ranks[cp_type]} ranks, which must divide them; legal: "
                f"{legal} ranks, or cp_comm_type=p2p"
            )


def _copied_head_problems(config: RunConfig, parallel: ContextParallelConfig) -> Iterator[str]:
    """Keys and values that an all-to-all would copy to several ranks, whose sums then depend on the layout."""
    heads = parallel.context_parallel_size if "a2a" in parallel.cp_comm_type else 1
    heads = max(heads, parallel.a2a_size if "a2a+p2p" in parallel.cp_comm_type else 1)
    groups = max(config.model.query_groups, config.invariant_parts) // parallel.tensor_model_parallel_size
    if groups % heads:
        yield (
            f"cp_comm_type={' '.join(parallel.cp_comm_type)} with layout_invariant=True cannot split {groups} "
            f"key-value heads over {heads} ranks; use --cp-comm-type p2p, or larger --layout-invariant-parts"
        )
