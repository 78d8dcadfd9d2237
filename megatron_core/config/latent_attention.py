"""Multi-latent attention: ranks of the latents and widths of its heads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LatentAttentionConfig:
    """Attention whose keys and values come from one small latent of each token (DeepSeek-AI 2024, arXiv 2405.04434,
    section 2.1); it has rotary positions, in channels of their own, whatever --position-embedding-type adds."""

    multi_latent_attention: bool = False
    """Multi-latent attention in all layers; default: one projection to queries, keys and values."""
    q_lora_rank: int | None = None
    """Width of the queries' latent; default: queries straight from the hidden state."""
    kv_lora_rank: int = 32
    """Width of the latent of keys and values."""
    qk_head_dim: int = 128
    """Channels of a query and key head without positions."""
    qk_pos_emb_head_dim: int = 64
    """Channels of a query head with rotary positions; those of the key are the same for all heads."""
    v_head_dim: int = 128
    """Channels of a value head."""
