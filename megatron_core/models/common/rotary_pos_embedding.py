"""For Megatron Core's users: rotary positions under their former path."""

from megatron_core.models.common.embeddings import RotaryEmbedding, apply_rotary_pos_emb

__all__ = ["RotaryEmbedding", "apply_rotary_pos_emb"]
