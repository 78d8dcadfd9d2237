"""Settings of layers with a recurrence over the tokens instead of attention."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, Resume, section, setting


@dataclass(frozen=True, kw_only=True)
@section(needs=c.RECURRENT, resume=Resume.TENSORS)
class RecurrentConfig:
    """Layers with a state of fixed size that each token updates, in place of attention over all earlier tokens."""

    experimental_attention_variant: Literal["gated_delta_net", "kimi_delta_attention", "dsa"] | None = setting(
        None, when=ALWAYS
    )
    """Kind of the layers of --linear-attention-freq. gated_delta_net: a short convolution and the gated delta rule
    (Yang et al. 2025, arXiv 2412.06464; Qwen3-Next). kimi_delta_attention: the same with a decay for each channel of a
    key (Kimi Team 2025, arXiv 2510.26692). Or dsa: in all layers, attention to the keys that an indexer selects
    (DeepSeek-V3.2). Default: attention in all layers."""
    linear_attention_freq: tuple[int, ...] | None = setting(None)
    """Layers with the recurrence. One number n: all but every n-th layer, which has attention. One number per layer: 1
    recurrence, 0 attention; also an expression such as ([1]*3+[0])*12."""
    linear_key_head_dim: int = setting(128, r.SIZE)
    """Channels of a query or key head of the recurrence."""
    linear_value_head_dim: int = setting(128, r.SIZE)
    """Channels of a value head of the recurrence."""
    linear_num_key_heads: int = setting(16, r.SIZE)
    """Number of query and key heads of the recurrence."""
    linear_num_value_heads: int = setting(32, r.SIZE)
    """Number of value heads of the recurrence, each with a state; several may share a query and key head."""
