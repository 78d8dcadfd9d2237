"""Sparse attention: an indexer selects the keys of each query (DeepSeek-V3.2)."""

from megatron_core.feature import Feature
from megatron_core.features.sparse_attention.rules import (
    has_sparse_attention,
    other_stage_problems,
    sparse_attention_problems,
)
from megatron_core.features.sparse_attention.settings import INDEXER_LOSS, SparseAttentionConfig

SPARSE_ATTENTION = Feature(
    name="sparse_attention",
    settings=SparseAttentionConfig,
    is_used=has_sparse_attention,
    problems=sparse_attention_problems,
    resume_problems=other_stage_problems,
    change_stage="megatron_core.features.sparse_attention.new_indexers:freeze_but_indexers",
    added_weights="megatron_core.features.sparse_attention.new_indexers:NewIndexers",
    attention_kinds={"sparse_latent": "megatron_core.features.sparse_attention.kinds:SparseLatent"},
    shown_losses=(INDEXER_LOSS,),
    layers={"sparse_latent": "megatron_core.features.sparse_attention.attention:SparseLatentAttention"},
)
