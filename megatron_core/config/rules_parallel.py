"""Rules for how the sizes of the model are split over ranks."""

from collections.abc import Iterator
from math import prod

from megatron_core.config.rule_helpers import divisors, leaves_rest, nearest_multiples, uneven
from megatron_core.config.run import RunConfig
from megatron_core.schedules import schedules, training_schedules


def split_problems(config: RunConfig) -> Iterator[str]:
    """Sequences and key-value groups that cannot be split evenly over ranks."""
    model, parallel = config.model, config.parallel
    tp = parallel.tensor_model_parallel_size
    length = config.data.seq_length
    unit, required_by = parallel.sequence_unit
    if parallel.context_parallel_size > 1 and leaves_rest(length, unit):
        nearest = nearest_multiples(length, unit)
        yield f"seq_length={length} is not a multiple of {required_by}; nearest legal: {nearest}"
    # A gate and these norms have rows for each group, which no rank may share; without them, ranks may share a group.
    if model.attention_output_gate or model.qk_layernorm_over_heads or model.qk_layernorm_weight_per_head:
        yield from uneven("num_query_groups", model.query_groups, "tensor_model_parallel_size", tp)


def parallel_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Sizes of the layout that contradict each other, the number of ranks or the model."""
    yield from _world_problems(config, world_size)
    yield from _tensor_problems(config, world_size)
    yield from _pipeline_problems(config)
    yield from _rank_order_problems(config, world_size)


def _world_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """World sizes that are not a multiple of a model copy or of an expert copy."""
    parallel = config.parallel
    pp = parallel.pipeline_model_parallel_size
    if leaves_rest(world_size, parallel.model_parallel_size):
        sizes = {
            "tensor_model_parallel_size": parallel.tensor_model_parallel_size,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": parallel.context_parallel_size,
        }
        remedy = f"sizes whose product divides {world_size}"
        yield _uneven_world(world_size, parallel.model_parallel_size, sizes, parallel.smallest_world_size, remedy)
    elif leaves_rest(world_size, parallel.expert_model_size):
        sizes = {
            "expert_tensor_parallel_size": parallel.expert_tensor_size,
            "expert_model_parallel_size": parallel.expert_model_parallel_size,
            "pipeline_model_parallel_size": pp,
        }
        remedy = f"sizes of experts whose product divides the {world_size // pp} ranks of a stage"
        yield _uneven_world(world_size, parallel.expert_model_size, sizes, parallel.smallest_world_size, remedy)


def _uneven_world(world_size: int, copy: int, sizes: dict[str, int], smallest: int, remedy: str) -> str:
    """The message about a world that is not a multiple of a ``copy``, the product of ``sizes``; those of 1 are left
    out, so that it fits in two lines."""
    product = " x ".join(f"{name}={size}" for name, size in sizes.items() if size != 1)
    return (
        f"world_size={world_size} is not a multiple of {copy} ({product}); start {smallest} ranks or a multiple, or "
        f"choose {remedy}"
    )


def tensor_parallel_sizes(config: RunConfig, world_size: int) -> list[int]:
    """Every legal tensor_model_parallel_size for the other settings.

    It must split heads, key-value groups, the MLP and, with sequence parallel, the sequence; and ``world_size`` must be
    a multiple of TP x PP x CP. If no size fits the world, all sizes that fit the model.
    """
    model, parallel = config.model, config.parallel
    cp = max(parallel.context_parallel_size, 1)
    lengths = config.data.length_units if parallel.sequence_parallel else ()
    even = [*_split_sizes(config).values(), *(length // cp for length in lengths)]
    groups = model.query_groups if model.may_have_attention else even[0]
    # Fewer groups than ranks are legal if each rank belongs to exactly one group.
    legal = [
        tp
        for tp in divisors(even[0])
        if not any(leaves_rest(size, tp) for size in even) and (groups % tp == 0 or tp % groups == 0)
    ]
    other_ranks = parallel.pipeline_model_parallel_size * parallel.context_parallel_size
    return [tp for tp in legal if not leaves_rest(world_size, tp * other_ranks)] or legal


def _split_sizes(config: RunConfig) -> dict[str, int]:
    """The sizes of the model's layers that tensor parallelism must split evenly."""
    model = config.model
    sizes = {"num_attention_heads": model.num_attention_heads} if model.may_have_attention else {}
    sizes |= {name: getattr(model, name) for name in model.sizes_over_ranks}
    return sizes | ({"ffn_hidden_size": model.ffn_size} if model.may_have_mlp else {})


def _tensor_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Sizes that tensor parallelism cannot split evenly."""
    model, tp, length = config.model, config.parallel.tensor_model_parallel_size, config.data.seq_length
    if min(tp, model.hidden_size, model.num_attention_heads, model.query_groups) < 1:
        return
    wrong = [f"{name}={size}" for name, size in _split_sizes(config).items() if leaves_rest(size, tp)]
    groups = model.query_groups
    if model.group_query_attention and model.may_have_attention and leaves_rest(groups, tp) and leaves_rest(tp, groups):
        wrong.append(f"num_query_groups={groups}")
    way_out = ""
    if config.parallel.sequence_parallel and config.parallel.context_parallel_size == 1 and leaves_rest(length, tp):
        wrong.append(f"seq_length={length}")
        way_out = f", or a seq_length of {nearest_multiples(length, tp)}, or no --sequence-parallel"
    if wrong:
        legal = ", ".join(map(str, tensor_parallel_sizes(config, world_size)))
        yield (
            f"{' and '.join(wrong)} cannot be split over tensor_model_parallel_size={tp}; "
            f"legal for this model on {world_size} ranks: {legal}{way_out}"
        )


def _pipeline_problems(config: RunConfig) -> Iterator[str]:
    """Numbers of stages and chunks that contradict each other or the number of layers."""
    parallel, layers = config.parallel, config.model.num_layers
    pp = parallel.pipeline_model_parallel_size
    chunks = parallel.num_virtual_stages_per_pipeline_rank
    if any(size is not None and size < 1 for size in (pp, layers, chunks)):
        return
    of_features = "pipeline_model_parallel_layout", "num_layers_per_virtual_pipeline_stage"
    if any(config.optional(name) is not None for name in of_features):
        return  # their feature checks chunks
    if pp == 1 and (chunks or 1) > 1:
        yield (
            f"num_virtual_stages_per_pipeline_rank={chunks} needs a pipeline of several ranks, but this one has one "
            "rank; remove it or raise pipeline_model_parallel_size to 2 or more"
        )
    if layers + parallel.accounted_layers < pp * parallel.num_chunks(layers):
        count = pp * parallel.num_chunks(layers)
        yield (
            f"num_layers={layers} is less than one layer for each of {count} stages "
            f"(pipeline_model_parallel_size={pp} x {count // pp} chunks); "
            f"legal: {count - parallel.accounted_layers} or more, or a pipeline_model_parallel_layout with empty stages"
        )


def _rank_order_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """The order must name each axis of size above 1 once; dense layers and experts must have the same pipelines."""
    parallel = config.parallel
    tp, pp = parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size
    dense = {"tp": tp, "cp": parallel.context_parallel_size, "dp": world_size // max(parallel.model_parallel_size, 1)}
    expert = {
        "tp": parallel.expert_tensor_size,
        "ep": parallel.expert_model_parallel_size,
        "dp": world_size // max(parallel.expert_model_size, 1),
    }
    named = parallel.rank_order.split("-")
    sizes = {name: max(dense.get(name, 1), expert.get(name, 1)) for name in ("tp", "cp", "ep", "dp")} | {"pp": pp}
    left_out = {axis for axis in sizes.keys() - set(named) if sizes[axis] > 1}
    if len(set(named)) != len(named) or set(named) - sizes.keys() or left_out:
        yield (
            f"rank_order={parallel.rank_order} must name each axis once; "
            "legal: any order of tp-cp-ep-dp-pp (axes of size 1 may be left out)"
        )
    elif pp > 1 and world_size % parallel.smallest_world_size == 0:
        # Neighbouring stages exchange messages for dense layers and experts alike, so both views must number them
        # equally.
        faster = named[: named.index("pp")]
        apart = [prod(view.get(axis, 1) for axis in faster) for view in (dense, expert)]
        if apart[0] != apart[1]:
            yield (
                f"rank_order={parallel.rank_order} places neighbouring stages {apart[0]} ranks apart for dense layers "
                f"and {apart[1]} for experts; legal: any order that ends with pp"
            )


def schedule_problems(config: RunConfig) -> Iterator[str]:
    """A schedule that does not allow the number of chunks."""
    parallel, schedule = config.parallel, config.parallel.pipeline_schedule
    if schedule is None or config.model.num_layers < 1 or parallel.pipeline_model_parallel_size < 1:
        return
    if any(parallel.stage_problems(config)):
        return  # the number of chunks is unknown
    wanted, chunks = schedules()[schedule].chunks, parallel.num_chunks(config.model.num_layers)
    if wanted is None and chunks == 1:
        yield (
            f"pipeline_schedule={schedule} with one chunk on each rank is 1f1b; set "
            "num_virtual_stages_per_pipeline_rank to 2 or more, or choose 1f1b"
        )
    elif wanted not in (None, 1) and parallel.pipeline_model_parallel_size == 1:
        yield (
            f"pipeline_schedule={schedule} has {wanted} chunks on each of several pipeline ranks, but there is one "
            "rank; remove it or raise pipeline_model_parallel_size to 2 or more"
        )
    elif wanted not in (None, chunks):
        alternatives = ", ".join(name for name in training_schedules() if schedules()[name].chunks in (None, chunks))
        yield (
            f"pipeline_schedule={schedule} cannot have {chunks} chunks on each rank; legal: {wanted} (with {chunks} "
            f"chunks: {alternatives})"
        )
