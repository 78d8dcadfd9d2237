"""Rules of context parallelism over a number of ranks that depends on the length."""

from collections.abc import Iterator

from megatron_core.config.parallel import UNCOMPRESSED
from megatron_core.config.rule_helpers import shown
from megatron_core.config.run import RunConfig
from megatron_core.features.dynamic_context_parallelism.settings import DynamicContextConfig

EXCLUDED = {
    "num_experts": "experts exchange tokens in each micro-batch; remove --num-experts",
    "hybrid_layer_pattern": "states of recurrences are not passed between these ranks; remove --hybrid-layer-pattern",
    "experimental_attention_variant": "it exchanges states or indices between ranks of a fixed size; remove it",
    "mtp_num_layers": "later tokens are read from ranks of a fixed size; remove --mtp-num-layers",
    "attention_chunk_size": "its chunks are those of whole samples; remove --attention-chunk-size",
    "fp8_format": "scales would depend on the assignment of documents; remove --fp8-format",
    "layout_invariant": "sums depend on the assignment of documents; remove --layout-invariant",
    "compile": "documents have many lengths; remove --compile",
    "dpo": "the loss needs whole answers; remove --dpo",
    "kd_teacher": "the teacher reads whole samples; remove --kd-teacher",
    "choices_data_path": "questions are whole samples; remove --choices-data-path",
    "outer_steps": "groups of replicas have batches of their own; remove --outer-steps",
    "replay_interval": "a repeated step reads the batch of another rank; remove --replay-interval",
}
"""Settings that cannot be used with it, with the reason and the remedy."""


def division_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Numbers of ranks that are not powers of 2, samples that are too long, and settings that exclude it."""
    parallel = config.parallel.section(DynamicContextConfig)
    if (tokens := parallel.max_seqlen_per_dp_cp_rank) is None:
        return  # the declaration of the setting reports it
    ranks = world_size // max(parallel.tensor_model_parallel_size * parallel.pipeline_model_parallel_size, 1)
    if ranks & (ranks - 1):
        yield (
            f"dynamic_context_parallel=True divides documents over 1, 2, 4, ... ranks, and dp x cp = {ranks} is "
            "not a power of 2; start another number of ranks"
        )
    if tokens * ranks < config.data.seq_length:
        yield (
            f"max_seqlen_per_dp_cp_rank={tokens} on dp x cp = {ranks} ranks is less than seq_length="
            f"{config.data.seq_length}, the longest document; legal: {-(-config.data.seq_length // max(ranks, 1))} or "
            "more"
        )
    smallest = parallel.min_dynamic_context_parallel_size
    if smallest & (smallest - 1) or smallest > ranks:
        yield f"min_dynamic_context_parallel_size={smallest} must be a power of 2, up to dp x cp = {ranks}"
    for name, reason in _excluded(config).items():
        yield f"{name}={shown(config.value(name))} cannot be used with dynamic_context_parallel=True: {reason}"


def _excluded(config: RunConfig) -> dict[str, str]:
    """Settings of a run that exclude it, each with the reason and the remedy."""
    parallel = config.parallel
    excluded = {name: reason for name, reason in EXCLUDED.items() if config.optional(name) not in (None, False, 0, ())}
    if parallel.pipeline_model_parallel_size > 1:
        excluded["pipeline_model_parallel_size"] = "ranks have different numbers of micro-batches; use 1"
    if parallel.dp_zero_stage > 1:
        excluded["dp_zero_stage"] = "ranks sum gradients in each micro-batch; use --zero-stage 1"
    if config.optional("calculate_per_token_loss") is False:
        excluded["calculate_per_token_loss"] = "the mean depends on micro-batches; add --calculate-per-token-loss"
    if {"a2a", "a2a+p2p"} & set(config.optional("cp_comm_type") or ()):
        excluded["cp_comm_type"] = "use --cp-comm-type p2p or all_gather"
    if config.optional("cuda_graph_impl") not in (None, "none"):
        excluded["cuda_graph_impl"] = "documents have many lengths; use --cuda-graph-impl none"
    if config.model.attention_backend == "flex":
        excluded["attention_backend"] = "it needs whole sequences; use --attention-backend auto"
    if parallel.grad_compression not in UNCOMPRESSED:
        excluded["grad_compression"] = "its errors depend on the assignment; use --grad-compression bf16 or none"
    return excluded


def describe_division(config: RunConfig) -> str:
    """The line of the feature in the description of a run."""
    tokens = config.parallel.section(DynamicContextConfig).max_seqlen_per_dp_cp_rank
    return f"dynamic context parallelism: each document on as many ranks as have at most {tokens} of its tokens"
