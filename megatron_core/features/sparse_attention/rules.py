"""Use and rules of attention to the keys that an indexer selects."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_core.config.run import RunConfig
from megatron_core.features.sparse_attention.settings import SparseAttentionConfig

REFUSED = {
    "attention_dropout": "attention to selected keys has no dropout; use 0",
    "attn_logit_softcapping": "scores of selected keys are not bounded; remove --attn-logit-softcapping",
    "window_size": "the indexer chooses among all keys; remove --window-size",
    "attention_chunk_size": "the indexer chooses among all keys; remove --attention-chunk-size",
    "fp8_format": "the indexer's projections are not computed in FP8; remove --fp8-format",
    "compile": "the choice of keys is not compiled; remove --compile",
}
"""Settings that cannot be used with sparse attention, with the reason and the remedy."""
REFUSED_IN_WARMUP = {
    "dsa_indexer_use_sparse_loss": "no keys are selected; remove --dsa-indexer-use-sparse-loss",
    "mtp_num_layers": "these layers are frozen as a whole; remove --mtp-num-layers until the indexers are trained",
}
"""Settings that cannot be used while only indexers are trained, with the reason and the remedy."""


def has_sparse_attention(config: RunConfig) -> bool:
    """Whether indexers select the keys of queries."""
    return config.model.section(SparseAttentionConfig).has_sparse_attention


def sparse_attention_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that contradict sparse attention."""
    model = config.model.section(SparseAttentionConfig)
    parallel = config.parallel
    flat = config.flat()
    if not model.has_sparse_attention:
        return
    chosen = "experimental_attention_variant=dsa"
    if not config.optional("multi_latent_attention"):
        yield f"{chosen} needs multi_latent_attention=True, whose keys it selects; add --multi-latent-attention"
    rotary_channels = config.optional("qk_pos_emb_head_dim") or 0
    if model.dsa_indexer_head_dim < rotary_channels:
        yield (
            f"dsa_indexer_head_dim={model.dsa_indexer_head_dim} is too small for the qk_pos_emb_head_dim="
            f"{rotary_channels} channels with rotary positions; use at least as many"
        )
    for name, reason in REFUSED.items():
        if flat[name]:
            yield f"{name}={flat[name]} cannot be used with {chosen}: {reason}"
    if model.attention_backend == "flex":
        yield f"attention_backend=flex cannot be used with {chosen}: it cannot mask single keys; use auto"
    if parallel.context_parallel_size > 1 and set(flat["cp_comm_type"]) != {"all_gather"}:
        yield (
            f"cp_comm_type={' '.join(flat['cp_comm_type'])} cannot be used with {chosen}, whose queries choose among "
            "the keys of all ranks; add --cp-comm-type all_gather"
        )
    if model.dsa_indexer_warmup:
        for name, reason in REFUSED_IN_WARMUP.items():
            if flat[name]:
                yield f"{name}={flat[name]} cannot be used with dsa_indexer_warmup=True: {reason}"
    rank = config.optional("lora_rank")
    if model.trains_indexers and rank is not None:
        yield (
            f"dsa_indexer_loss_coeff={model.dsa_indexer_loss_coeff:g} cannot be used with lora_rank="
            f"{rank}, which freezes the indexers; use 0"
        )


def other_stage_problems(stored: Mapping[str, Any], config: RunConfig, folder: Path) -> Iterator[str]:
    """Stored settings of a stage that trained other weights, whose optimizer state is not that of this run."""
    if not config.model.section(SparseAttentionConfig).has_sparse_attention or config.checkpoint.no_load_optim:
        return
    names = "dsa_indexer_warmup", "dsa_indexer_loss_coeff"
    now = {name: getattr(config.model, name) for name in names}
    before = {name: stored.get(name, now[name]) for name in names}
    if any(bool(before[name]) != bool(now[name]) for name in names):
        current, trained = (", ".join(f"{name}={value}" for name, value in stage.items()) for stage in (now, before))
        yield (
            f"{current}, but the checkpoint {folder} was trained with {trained}, so its optimizer state is of other "
            "weights; to begin this stage with its weights and new optimizer state, add --finetune"
        )
