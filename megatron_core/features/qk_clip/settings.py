"""Settings of QK-clip."""

from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Resume, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section(when=c.TRAINING, resume=Resume.REPORTED)
class QKClipConfig:
    """Record attention logits, and limit them by scaling the weights of queries and keys."""

    log_max_attention_logit: bool = setting(False)
    """Show and store the largest attention logit of each step (scaled, before the softmax). Scores are computed
    a second time."""
    qk_clip: bool = setting(False)
    """QK-clip, which with --optimizer muon is MuonClip (Kimi K2): after each update, scale the query and key weights of
    heads whose largest attention logit in the batch exceeds --qk-clip-threshold. Scores are computed a second time."""
    qk_clip_threshold: float = setting(100.0, r.POSITIVE, needs=given("qk_clip"), is_refinement=True)
    """Largest attention logit (scaled, before the softmax) that --qk-clip leaves unchanged."""
    qk_clip_alpha: float = setting(0.5, r.UP_TO_1, needs=given("qk_clip"), is_refinement=True)
    """Share of the queries in the factor g of --qk-clip: g^alpha for queries, g^(1 - alpha) for keys."""


def uses_qk_clip(config: RunConfig) -> bool:
    """Whether a run records attention logits."""
    settings = config.section(QKClipConfig)
    return (settings.qk_clip or settings.log_max_attention_logit) and not config.training.skip_train


def recording_setting(settings: QKClipConfig) -> str:
    """The setting for which logits are recorded."""
    return "qk_clip" if settings.qk_clip else "log_max_attention_logit"
