"""QK-clip: limits attention logits by scaling the weights of queries and keys (MuonClip, Kimi K2, arXiv 2507.20534)."""

from megatron_core.feature import Feature
from megatron_core.features.qk_clip.rules import clip_problems
from megatron_core.features.qk_clip.settings import QKClipConfig, uses_qk_clip

QK_CLIP = Feature(
    name="qk_clip",
    settings=QKClipConfig,
    is_used=uses_qk_clip,
    problems=clip_problems,
    run_part="megatron_core.features.qk_clip.clip:QKClip",
)
