"""Rules for --layout-invariant: sizes that have canonical parts, and settings whose sums depend on the layout."""

from collections.abc import Iterator
from typing import Any

from megatron_core.config.run import RunConfig
from megatron_core.config.tree import smallest_factor
from megatron_core.text_file import read_table

_TABLES = read_table(__file__)
REFUSED: dict[str, str] = _TABLES["refused"]
"""Settings that cannot be used, with the reason and the remedy."""
ONLY: list[tuple[str, Any, str]] = _TABLES["only"]
"""Setting, the only value that can be used, the reason and the remedy."""


def has_equal_bits(config: RunConfig) -> bool:
    """Whether sums have one order in every layout."""
    return config.parallel.layout_invariant


def invariance_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings under which --layout-invariant could not hold."""
    if not config.parallel.layout_invariant:
        return
    flat = config.flat()
    for name, reason in REFUSED.items():
        if flat[name]:
            yield f"{name}={flat[name]} cannot be used with layout_invariant=True: {reason}"
    for name, only, reason in ONLY:
        if name in flat and flat[name] not in (only, None):
            yield f"{name}={flat[name]} cannot be used with layout_invariant=True: {reason}"
    if config.model.fuses_output_layer_with_loss:
        yield (
            "cross_entropy_fusion_impl=linear cannot be used with layout_invariant=True: it cuts tokens by memory; "
            "use native"
        )
    if config.optional("num_experts") is not None and config.model.add_bias_linear:
        yield (
            "disable_bias_linear=False cannot be used with layout_invariant=True and experts, whose biases have no "
            "canonical parts; add --disable-bias-linear"
        )
    if config.optimizer.optimizer == "lamb":
        yield "optimizer=lamb cannot be used with layout_invariant=True: its trust ratios are sums over ranks; use adam"
    yield from _part_problems(config)
    yield from _chunk_problems(config)


def _part_problems(config: RunConfig) -> Iterator[str]:
    """Parts of features: of all ranks the same number, and neighbouring ones."""
    model = config.model
    parallel = config.parallel
    count = config.invariant_parts
    sizes = {"num_attention_heads": model.num_attention_heads}
    if any(map(model.has_dense_mlp, range(model.num_layers))):
        sizes["ffn_hidden_size"] = model.ffn_size
    if model.added_layers:
        sizes["hidden_size"] = model.hidden_size
    has_experts = config.optional("num_experts") is not None
    if has_experts:
        sizes["moe_ffn_hidden_size"] = config.optional("expert_ffn_size")
        sizes["moe_shared_expert_intermediate_size"] = config.optional("moe_shared_expert_intermediate_size") or count
    for name, size in sizes.items():
        if size % count:
            yield (
                f"{name}={size} is not a multiple of layout_invariant_parts={count}; choose a multiple, or another "
                "--layout-invariant-parts, the same in all layouts"
            )
    groups = model.query_groups
    if model.num_attention_heads % count == 0 and groups % count and count % groups:
        yield (
            f"num_query_groups={groups} and layout_invariant_parts={count} do not divide each other; choose another "
            "--layout-invariant-parts"
        )
    if model.attention_output_gate and groups < count:
        yield (
            f"attention_output_gate=True with num_query_groups={groups} needs --layout-invariant-parts of at most "
            f"{groups}"
        )
    legal = [count // size for size in reversed(subtree_sizes(count))]
    tensor = {"tensor_model_parallel_size": parallel.tensor_model_parallel_size}
    if has_experts:
        tensor["expert_tensor_parallel_size"] = parallel.expert_tensor_size
    for name, size in tensor.items():
        if size not in legal:
            yield (
                f"{name}={size} cannot be used with layout_invariant_parts={count}; legal: "
                f"{', '.join(map(str, legal))}, or set --layout-invariant-parts to a multiple of {size}, the same in "
                "all layouts"
            )


def _chunk_problems(config: RunConfig) -> Iterator[str]:
    """Chunks of sequences: whole ones on every rank."""
    parallel = config.parallel
    data = config.data
    chunks = parallel.layout_invariant_chunks
    cp = parallel.context_parallel_size
    needed = 2 * cp
    splits_latents = config.optional("multi_latent_attention") and parallel.sequence_parallel
    if config.optional("num_experts") is not None or splits_latents:
        needed = max(needed, cp * parallel.tensor_model_parallel_size)
    if chunks % needed:
        yield (
            f"layout_invariant_chunks={chunks} is not a multiple of {needed}, which context_parallel_size={cp} needs"
            f"{' with this model' if needed > 2 * cp else ''}; use --layout-invariant-chunks "
            f"{-(-chunks // needed) * needed}, the same in all layouts"
        )
    lengths = {"seq_length": data.seq_length}
    if (warmup := config.optional("seq_length_warmup")) is not None:
        lengths["seq_length_warmup"] = warmup[0]
        lengths["the increment of seq_length_warmup"] = warmup[1]
    for name, length in lengths.items():
        if length % chunks:
            yield (
                f"{name}={length} is not a multiple of layout_invariant_chunks={chunks}; choose a multiple, or fewer "
                "--layout-invariant-chunks, the same in all layouts"
            )


def subtree_sizes(num_parts: int) -> list[int]:
    """The numbers of neighbouring parts that the tree joins to one partial sum, from 1 to ``num_parts``."""
    sizes = [1]
    while sizes[-1] < num_parts:
        sizes.append(sizes[-1] * smallest_factor(num_parts // sizes[-1]))
    return sizes
