"""Rules for sequences that are split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm, prod

from megatron_core.config.parallel import ParallelConfig
from megatron_core.config.rules_layout import divisors, leaves_rest, nearest_multiples
from megatron_core.config.run import RunConfig


def sequence_unit(parallel: ParallelConfig) -> tuple[int, str]:
    """What every sequence length must be a multiple of, and the settings that ask for it."""
    cp, tp = max(parallel.context_parallel_size, 1), max(parallel.tensor_model_parallel_size, 1)
    tp = tp if parallel.sequence_parallel else 1
    of_tp = f"tensor_model_parallel_size={tp} (sequence_parallel=True)"
    if cp == 1:
        return tp, of_tp
    of_cp = f"2 x context_parallel_size={cp}"
    return lcm(2 * cp, cp * tp), of_cp if tp == 1 else f"{lcm(2 * cp, cp * tp)}, for {of_cp} and {of_tp}"


def context_problems(config: RunConfig) -> Iterator[str]:
    """Lengths, heads and kinds of communication that do not go with the context-parallel size."""
    parallel, length = config.parallel, config.data.seq_length
    cp = parallel.context_parallel_size
    if cp <= 1:
        return
    unit, shown = sequence_unit(parallel)
    if leaves_rest(length, unit):
        nearest = nearest_multiples(length, unit)
        yield f"seq_length={length} is not a multiple of {shown}; nearest legal: {nearest}"
    kinds, layers = parallel.cp_comm_type, config.model.num_layers
    if len(kinds) not in (1, layers):
        yield (
            f"cp_comm_type={' '.join(kinds)} names {len(kinds)} kinds for num_layers={layers}; give one for all layers "
            "or one for each"
        )
    sizes = parallel.hierarchical_context_parallel_sizes
    if "a2a+p2p" in kinds and (sizes is None or len(sizes) != 2 or prod(sizes) != cp or min(sizes) < 1):
        legal = ", ".join(f"{size} {cp // size}" for size in divisors(cp))
        yield (
            f"hierarchical_context_parallel_sizes={sizes} are not the two sizes (a2a, p2p) of cp_comm_type=a2a+p2p, "
            f"whose product is context_parallel_size={cp}; legal: {legal}"
        )
    elif sizes is not None and "a2a+p2p" not in kinds:
        yield (
            f"hierarchical_context_parallel_sizes={sizes} has no effect with cp_comm_type={' '.join(kinds)}; add "
            "--cp-comm-type a2a+p2p or remove it"
        )
    else:
        yield from _head_problems(config, {"a2a": cp, "a2a+p2p": parallel.a2a_size})


def _head_problems(config: RunConfig, ranks: dict[str, int]) -> Iterator[str]:
    """Heads that cannot be exchanged evenly; ``ranks`` is among how many, by kind."""
    heads, tp = config.model.num_attention_heads, max(config.parallel.tensor_model_parallel_size, 1)
    for kind in dict.fromkeys(config.parallel.cp_comm_type):
        if leaves_rest(heads // tp, ranks.get(kind, 1)):
            legal = ", ".join(map(str, divisors(heads // tp)))
            yield (
                f"cp_comm_type={kind} exchanges the {heads // tp} heads of a rank (num_attention_heads={heads} / "
                f"tensor_model_parallel_size={tp}) among {ranks[kind]} ranks, which cannot share them; legal: {legal} "
                "ranks, or cp_comm_type=p2p"
            )
