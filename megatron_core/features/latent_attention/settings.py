"""Settings of multi-head latent attention."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.attention import ATTENTION_KINDS, GroupedQuery
from megatron_core.config.model import ModelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import ALWAYS, Resume, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section(needs=given("multi_latent_attention"), resume=Resume.FUNCTION)
class LatentAttentionConfig(ModelConfig):
    """Attention whose keys and values are projections of one small latent per token (DeepSeek-AI 2024, arXiv
    2405.04434, section 2.1). It always has rotary positions, in separate channels."""

    multi_latent_attention: bool = setting(False, when=ALWAYS)
    """Use multi-latent attention in all layers; default: one projection to queries, keys and values."""
    q_lora_rank: int | None = setting(None, r.SIZE)
    """Width of the latent of queries; default: queries are projections of the hidden state."""
    kv_lora_rank: int = setting(32, r.SIZE)
    """Width of the latent of keys and values."""
    qk_head_dim: int = setting(128, r.SIZE)
    """Channels of a query or key head without positions."""
    qk_pos_emb_head_dim: int = setting(64, r.SIZE)
    """Channels of a query head with rotary positions; all heads share these channels of the key."""
    v_head_dim: int = setting(128, r.SIZE)
    """Channels of a value head."""
    latent_norm_epsilon: float | None = setting(None, r.POSITIVE, when=c.QK_LAYERNORM)
    """Added to the variance in the norms of latents; default: --norm-epsilon."""

    @property
    def attention_name(self) -> str:
        """The name of the kind of attention in all layers."""
        name = super().attention_name
        # Another feature's kind, such as sparse attention, is a kind of latent attention.
        return "latent" if self.multi_latent_attention and name == self.attention_kind else name


def latent_attention_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """A second kind of attention."""
    model = config.model.section(LatentAttentionConfig)
    kind = model.attention_kind
    if model.multi_latent_attention and kind != GroupedQuery.name and kind in ATTENTION_KINDS:
        yield f"attention_kind={kind} and multi_latent_attention=True exclude one another; keep one of them"
