"""Multi-head latent attention (MLA): keys and values are projections of one small latent per token (DeepSeek-V2)."""

from megatron_core.feature import Feature
from megatron_core.features.latent_attention.settings import LatentAttentionConfig, latent_attention_problems

LATENT_ATTENTION = Feature(
    name="latent_attention",
    settings=LatentAttentionConfig,
    is_used=lambda config: config.model.section(LatentAttentionConfig).multi_latent_attention,
    problems=latent_attention_problems,
    attention_kinds={"latent": "megatron_core.features.latent_attention.kinds:MultiLatent"},
    layers={"latent": "megatron_core.features.latent_attention.attention:LatentAttention"},
)
