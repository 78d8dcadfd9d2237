"""Rules for the model's sizes and for how they are split over ranks."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_core.config.run import RunConfig


def divisors(number: int) -> list[int]:
    """All divisors in ascending order."""
    return [d for d in range(1, number + 1) if number % d == 0]


def leaves_rest(number: int, divisor: int) -> bool:
    """Whether ``number / divisor`` leaves a rest; sizes below 1 have their own sentence."""
    return number >= 1 and divisor >= 1 and number % divisor != 0


def _uneven(name: str, number: int, over: str, parts: int, way_out: str = "") -> Iterator[str]:
    """The sentence for a size that does not split evenly."""
    if leaves_rest(number, parts):
        legal = ", ".join(map(str, divisors(number)))
        yield f"{name}={number} cannot be split over {over}={parts}; legal: {legal}{way_out}"


def model_problems(config: RunConfig) -> Iterator[str]:
    """Heads, groups, positions, activations and losses that do not go together."""
    model = config.model
    if model.kv_channels is None:
        yield from _uneven(
            "hidden_size",
            model.hidden_size,
            "num_attention_heads",
            model.num_attention_heads,
            " (or give each head its width with kv_channels)",
        )
    yield from _group_problems(config)
    yield from _position_problems(config)
    chosen = [n for n in ("swiglu", "geglu", "squared_relu", "openai_gelu") if getattr(model, n)]
    if len(chosen) > 1:
        yield f"{' and '.join(f'{name}=True' for name in chosen)} exclude one another; keep one activation"
    if model.cross_entropy_fusion_impl == "linear" and not model.cross_entropy_loss_fusion:
        yield (
            "cross_entropy_fusion_impl=linear has no effect without cross_entropy_loss_fusion; "
            "add --cross-entropy-loss-fusion or remove it"
        )


def _group_problems(config: RunConfig) -> Iterator[str]:
    """Grouped-query attention."""
    model = config.model
    if model.num_query_groups is not None and not model.group_query_attention:
        yield (
            f"num_query_groups={model.num_query_groups} has no effect without group_query_attention; "
            "add --group-query-attention or remove it"
        )
    elif model.group_query_attention:
        yield from _uneven("num_attention_heads", model.num_attention_heads, "num_query_groups", model.query_groups)


def _position_problems(config: RunConfig) -> Iterator[str]:
    """Rotary channels and the table of learned positions."""
    model, seq_length = config.model, config.data.seq_length
    if model.position_embedding_type == "rope" and model.num_attention_heads >= 1:
        rotating = int(model.head_size * model.rotary_percent) if 0 < model.rotary_percent <= 1 else 2
        if rotating < 2 or rotating % 2:
            yield (
                f"rotary_percent={model.rotary_percent} of a head of {model.head_size} channels makes "
                f"{rotating} rotating channels, which must be even and 2 or more; "
                "change rotary_percent, kv_channels or hidden_size"
            )
    if model.position_embedding_type == "learned_absolute" and config.max_positions < seq_length:
        yield (
            f"max_position_embeddings={model.max_position_embeddings} is less than seq_length={seq_length}; "
            f"legal: {seq_length} or more, or nothing at all"
        )


def recompute_problems(config: RunConfig) -> Iterator[str]:
    """Recompute settings, which are complete or absent."""
    model = config.model
    details = {name: getattr(model, name) for name in ("recompute_method", "recompute_num_layers")}
    for name, value in details.items():
        if model.recompute_granularity == "full" and value is None:
            choice = "uniform or block" if name == "recompute_method" else f"1 to {model.num_layers}"
            yield f"{name}=None is missing for recompute_granularity=full; legal: {choice}"
        elif model.recompute_granularity != "full" and value is not None:
            yield (
                f"{name}={value} has no effect with recompute_granularity={model.recompute_granularity}; "
                "add --recompute-granularity full or remove it"
            )
    if (model.recompute_num_layers or 0) > model.num_layers >= 1:
        yield (
            f"recompute_num_layers={model.recompute_num_layers} is more than num_layers={model.num_layers}; "
            f"legal: 1 to {model.num_layers}"
        )


def parallel_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """The layout against the world, the model and itself."""
    yield from _world_problems(config, world_size)
    yield from _tensor_problems(config)
    yield from _pipeline_problems(config)
    yield from _rank_order_problems(config, world_size)
    parallel = config.parallel
    if parallel.overlap_param_gather and not parallel.use_distributed_optimizer:
        yield (
            "overlap_param_gather=True needs use_distributed_optimizer; "
            "add --use-distributed-optimizer or remove --overlap-param-gather"
        )


def _world_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Axes that are not supported yet, and a world that the model's copies do not fill."""
    parallel = config.parallel
    for name in ("context_parallel_size", "expert_model_parallel_size"):
        if getattr(parallel, name) > 1:
            yield f"{name}={getattr(parallel, name)} is not supported yet; legal: 1"
    if leaves_rest(world_size, parallel.model_parallel_size):
        yield (
            f"world_size={world_size} is not a multiple of {parallel.model_parallel_size}, "
            "the ranks of one model copy "
            f"(tensor_model_parallel_size={parallel.tensor_model_parallel_size} x "
            f"pipeline_model_parallel_size={parallel.pipeline_model_parallel_size} x "
            f"context_parallel_size={parallel.context_parallel_size}); start a multiple of "
            f"{parallel.model_parallel_size} ranks, or choose sizes whose product is one of "
            f"{', '.join(map(str, divisors(world_size)))}"
        )


def _tensor_problems(config: RunConfig) -> Iterator[str]:
    """What tensor parallelism splits."""
    model, tp = config.model, config.parallel.tensor_model_parallel_size
    if tp < 1:
        return
    axis = "tensor_model_parallel_size"
    yield from _uneven("num_attention_heads", model.num_attention_heads, axis, tp)
    # Fewer groups than ranks is legal when each rank belongs to exactly one group. C19
    groups = model.query_groups
    if model.group_query_attention and leaves_rest(groups, tp) and leaves_rest(tp, groups):
        legal = ", ".join(map(str, divisors(groups)))
        yield (f"num_query_groups={groups} cannot be split over {axis}={tp}; legal: {legal} or a multiple of {groups}")
    if model.hidden_size >= 1:
        yield from _uneven("ffn_hidden_size", model.ffn_size, axis, tp)
    if config.parallel.sequence_parallel:
        yield from _uneven("seq_length", config.data.seq_length, axis, tp, " (or remove --sequence-parallel)")


def _pipeline_problems(config: RunConfig) -> Iterator[str]:
    """Stages and chunks."""
    parallel, layers = config.parallel, config.model.num_layers
    pp = parallel.pipeline_model_parallel_size
    per_chunk = parallel.num_layers_per_virtual_pipeline_stage
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if any(size is not None and size < 1 for size in (pp, layers, per_chunk, chunks)):
        return
    if parallel.pipeline_model_parallel_layout is not None:
        return  # it says all by itself: rules_stages
    counted = layers + parallel.accounted_layers
    if per_chunk is not None and chunks is not None:
        yield (
            f"num_layers_per_virtual_pipeline_stage={per_chunk} and "
            f"num_virtual_stages_per_pipeline_rank={chunks} exclude one another; keep one of them"
        )
    if pp == 1 and (per_chunk is not None or (chunks or 1) > 1):
        what = "layers_per_virtual_pipeline_stage" if per_chunk else "virtual_stages_per_pipeline_rank"
        yield (
            f"num_{what}={per_chunk or chunks} interleaves the ranks of a pipeline, which has one rank; "
            "remove it or raise pipeline_model_parallel_size to 2 or more"
        )
    if per_chunk is not None and leaves_rest(counted, pp * per_chunk):
        yield _uneven_chunks(layers, parallel.accounted_layers, pp, per_chunk)
    elif counted < pp * parallel.num_chunks(layers):
        count = pp * parallel.num_chunks(layers)
        yield (
            f"num_layers={layers} is less than one layer for each of {count} stages "
            f"(pipeline_model_parallel_size={pp} x {count // pp} chunks); "
            f"legal: {count - parallel.accounted_layers} or more, or a pipeline_model_parallel_layout with empty stages"
        )


def _uneven_chunks(layers: int, accounted: int, pp: int, per_chunk: int) -> str:
    """The sentence for chunks that do not fill the ranks evenly; ``accounted``: embedding and loss that count, too."""
    what = f"(num_layers + {accounted} accounted for)" if accounted else "num_layers"
    layers += accounted
    head = f"num_layers_per_virtual_pipeline_stage={per_chunk} does not divide "
    if layers % pp:
        return head + (
            f"{what} / pipeline_model_parallel_size = {layers} / {pp}, which is not whole; "
            "use num_virtual_stages_per_pipeline_rank instead"
        )
    return head + (
        f"{what} / pipeline_model_parallel_size = {layers} / {pp} = {layers // pp}; "
        f"legal: {', '.join(map(str, divisors(layers // pp)))}"
    )


def _rank_order_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """The order names each axis once; an axis of size 1 may be left out."""
    parallel = config.parallel
    sizes = {
        "tp": parallel.tensor_model_parallel_size,
        "cp": parallel.context_parallel_size,
        "ep": parallel.expert_model_parallel_size,
        "dp": world_size // max(parallel.model_parallel_size, 1),
        "pp": parallel.pipeline_model_parallel_size,
    }
    named = parallel.rank_order.split("-")
    left_out = {axis for axis in sizes.keys() - set(named) if sizes[axis] > 1}
    if len(set(named)) != len(named) or set(named) - sizes.keys() or left_out:
        yield (
            f"rank_order={parallel.rank_order} must name each axis once; "
            "legal: any order of tp-cp-ep-dp-pp (axes of size 1 may be left out)"
        )
