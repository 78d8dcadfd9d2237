"""Rules of QK-clip, and of the record of attention logits."""

from collections.abc import Iterator

from megatron_core.config.flags import to_flag
from megatron_core.config.parallel import compression_of
from megatron_core.config.run import RunConfig
from megatron_core.features.qk_clip.settings import QKClipConfig, recording_setting


def clip_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings with which logits cannot be recorded, or weights not scaled."""
    settings = config.section(QKClipConfig)
    if settings.qk_clip or settings.log_max_attention_logit:
        yield from _record_problems(config, recording_setting(settings))
    if not settings.qk_clip:
        return
    flat = config.flat()
    reasons = {
        "dsa_indexer_warmup": "the weights of queries and keys are frozen",
        "layout_invariant": "its scores depend on the layout",
        "lora_rank": "the weights of queries and keys are frozen",
        "optimizer_cpu_offload": "it scales weights on the device",
        "optimizer_offload_dir": "it scales weights on the device",
        "zero3_param_cpu_offload": "it scales weights on the device",
        "zero3_param_offload_dir": "it scales weights on the device",
    }
    for name, reason in reasons.items():
        if flat[name]:
            yield f"{name}={flat[name]} cannot be used with qk_clip=True: {reason}; remove one of them"
    for name in ("qk_layernorm", "qk_l2_norm"):
        if flat[name] and not flat["multi_latent_attention"]:
            yield f"{name}=True cannot be used with qk_clip=True: norms undo the scaling; remove one of them"
    compression = compression_of(config.parallel)
    if compression is not None and compression.updates_outside_of_steps:
        yield (
            f"grad_compression={compression.name} cannot be used with qk_clip=True: its updates "
            "are not synchronized; remove one of them"
        )


def _record_problems(config: RunConfig, name: str) -> Iterator[str]:
    """Settings with which the logits are not those of queries and keys alone, or that leave none."""
    model = config.model
    flag = to_flag(name)
    if (graphs := config.optional("cuda_graph_impl") or "none") != "none":
        yield f"cuda_graph_impl={graphs} cannot be used with {name}=True: graphs record no logits; remove one of them"
    if config.optional("compile"):
        yield f"compile=True cannot be used with {name}=True: compiled layers do not record logits; remove one of them"
    if config.optional("dynamic_context_parallel"):
        yield (
            f"dynamic_context_parallel=True cannot be used with {name}=True: it would record padding, too; remove "
            f"{flag}"
        )
    if model.position_embedding_type == "alibi":
        yield (
            f"position_embedding_type=alibi cannot be used with {name}=True: the slopes of positions are not in the "
            f"recorded logits; remove {flag}, or use --position-embedding-type rope"
        )
    if not model.may_have_attention:
        yield (
            f"{name}=True has no effect with hybrid_layer_pattern={config.value('hybrid_layer_pattern')}, which has "
            f"no layer * or H with attention; remove {flag}"
        )
    pattern = config.optional("linear_attention_freq") or (1,)
    layers = model.num_layers
    only_recurrent = pattern[0] > layers if len(pattern) == 1 else len(pattern) == layers and all(pattern)
    if model.experimental_attention_variant is not None and only_recurrent:
        yield (
            f"{name}=True has no effect with linear_attention_freq={pattern}, which leaves no layer with attention; "
            f"remove {flag}"
        )
