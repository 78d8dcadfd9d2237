"""Rotary positions at their former path."""

from megatron.core.models.common.embeddings import (
    RotaryEmbedding,
    apply_rotary_pos_emb,
)
