"""Rules for FP8: requirements of recipes, and layouts that would change the scales."""

from collections.abc import Iterator

from megatron_core.config.attention import attention_of
from megatron_core.config.run import RunConfig
from megatron_core.features.fp8.settings import BLOCK, SMALL_BLOCK, FP8Config


def uses_fp8(config: RunConfig) -> bool:
    """Whether a run computes in FP8."""
    return config.section(FP8Config).fp8_format is not None


def fp8_problems(config: RunConfig, world_size: int = 1) -> Iterator[str]:
    """Settings of FP8 that contradict each other, the model or the layout."""
    fp8 = config.section(FP8Config)
    if not uses_fp8(config):
        return
    if not fp8.eight_bit_layers(config.model.num_layers):
        yield (
            f"num_layers_at_start_in_bf16={fp8.num_layers_at_start_in_bf16} and num_layers_at_end_in_bf16="
            f"{fp8.num_layers_at_end_in_bf16} leave none of num_layers={config.model.num_layers} in FP8; lower them, "
            "or remove --fp8-format"
        )
    if config.parallel.tp_comm_overlap_chunks > 1:
        chunks = config.parallel.tp_comm_overlap_chunks
        yield f"tp_comm_overlap_chunks={chunks} cannot be used with --fp8-format; remove one of them"
    if fp8.fp8_param_gather:
        yield from _gather_problems(config)
    if size := block_size(fp8):
        yield from _split_problems(config, size)
        yield from _sequence_problems(config, size)


def block_size(fp8: FP8Config) -> int | None:
    """Elements of a block along the summed dim; None for recipes with one scale along the whole dim."""
    return {"blockwise": BLOCK, "mxfp8": SMALL_BLOCK}.get(fp8.fp8_recipe)


def _gather_problems(config: RunConfig) -> Iterator[str]:
    fp8 = config.section(FP8Config)
    stage = config.parallel.dp_zero_stage
    if fp8.fp8_recipe in ("rowwise", "mxfp8"):
        yield (
            f"fp8_param_gather=True, but with fp8_recipe={fp8.fp8_recipe} forward and backward use different "
            "8-bit weights; legal: tensorwise, delayed, blockwise, or remove --fp8-param-gather"
        )
    if stage == 0:
        yield "fp8_param_gather=True, but zero_stage=0 gathers no weights; add --use-distributed-optimizer or remove it"
    elif stage < 3 and not (fp8.bf16 or fp8.fp16):
        yield (
            f"fp8_param_gather=True with zero_stage={stage} would overwrite the main weights, which are the weights "
            "themselves without --bf16; add --bf16, or use --zero-stage 3"
        )


def _split_problems(config: RunConfig, size: int) -> Iterator[str]:
    """Blocks that would be split over tensor-parallel ranks."""
    model = config.model
    parallel = config.parallel
    recipe = config.section(FP8Config).fp8_recipe
    tp = parallel.tensor_model_parallel_size
    recipe = config.section(FP8Config).fp8_recipe
    etp = parallel.expert_tensor_size
    projections = [projection for projection in attention_of(model).projections(1) if projection.split is not None]
    widths = [
        (projection.width, projection.inputs if projection.split == "inputs" else projection.outputs, tp)
        for projection in projections
    ]
    if any(map(model.has_dense_mlp, range(model.num_layers))):
        widths.append(("ffn_hidden_size", model.ffn_size, tp))
    blocks = map(model.block_of, range(model.num_layers))
    if model.added_layers or any(sublayer.linear for block in blocks for sublayer in (block.attention, block.mlp)):
        widths.append(("hidden_size", model.hidden_size, tp))
    if config.optional("num_experts") is not None:
        widths.append(("moe_ffn_hidden_size", config.optional("expert_ffn_size"), etp))
        shared = "moe_shared_expert_intermediate_size"
        if config.optional(shared) is not None:
            widths.append((shared, config.optional(shared), tp))
    for name, width, ranks in widths:
        if ranks > 1 and width % (ranks * size):
            yield (
                f"fp8_recipe={recipe} has blocks of {size}, and {name}={width} over {ranks} tensor-"
                f"parallel ranks is not a multiple of them: scales would depend on the layout; choose a multiple of "
                f"{ranks * size}, fewer ranks, or --fp8-recipe rowwise"
            )
    if tp > model.query_groups and recipe == "blockwise":
        yield (
            f"fp8_recipe=blockwise, but tensor_model_parallel_size={tp} ranks share {model.query_groups} key-value "
            "groups, so blocks of the QKV matrix depend on the layout; use --fp8-recipe rowwise or fewer ranks"
        )


def _sequence_problems(config: RunConfig, size: int) -> Iterator[str]:
    """Weight gradients have blocks along the tokens."""
    cp = config.parallel.context_parallel_size
    fp8 = config.section(FP8Config)
    tokens = config.data.seq_length * fp8.micro_batch_size
    if cp > 1 and fp8.fp8_wgrad and tokens % (2 * cp * size):
        yield (
            f"fp8_recipe={fp8.fp8_recipe} has blocks of {size} tokens in weight gradients, and seq_length x "
            f"micro_batch_size = {tokens} in {2 * cp} parts (context_parallel_size={cp}) is not a multiple: "
            f"scales would depend on the layout; choose a multiple of {2 * cp * size}, or --no-fp8-wgrad"
        )


def describe_fp8(config: RunConfig) -> str:
    """One line about the layers that run in FP8."""
    fp8 = config.section(FP8Config)
    total = config.model.num_layers
    layers = fp8.eight_bit_layers(total)
    unquantised = [i for i in range(total) if i not in layers]
    named_layers = f"layers {', '.join(map(str, unquantised))}, " if unquantised else ""
    gradients = "" if fp8.fp8_wgrad else ", without weight gradients"
    return (
        f"fp8: {fp8.fp8_format}, {fp8.fp8_recipe}{gradients}: linear layers of attention, MLP and experts in layers "
        f"{layers.start} to {layers.stop - 1}; in {fp8.compute_dtype}: {named_layers}embedding, output layer, router, "
        "norms, attention itself"
    )
