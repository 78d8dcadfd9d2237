"""Settings of the maximal update parametrization."""

from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import Resume, section, setting


@dataclass(frozen=True, kw_only=True)
@section(needs=c.MUP, resume=Resume.FUNCTION)
class MuPConfig:
    """Maximal update parametrization (Yang et al. 2022): hyperparameters tuned on a narrow model suit a wide one.

    With m = width / base width, the initial standard deviation of hidden matrices is init_method_std / sqrt(m), logits
    are divided by m, and attention scores by the channels of a head. ``OptimizerKind`` has the powers of m for rates.
    """

    use_mup: bool = setting(False, needs=c.NO_LATENT_ATTENTION)
    """Scale initial weights, attention, logits and learning rates with --hidden-size over --mup-base-hidden-size."""
    mup_base_hidden_size: int | None = setting(None, r.COUNT)
    """Width for which --lr was tuned; default: --hidden-size, so that only attention is scaled."""
    mup_base_head_dim: float | None = setting(None, r.POSITIVE, when=c.DEFAULT_SOFTMAX_SCALE)
    """Channels of a head of the base model; scores are multiplied by their square root; default: 1."""
    mup_attn_scale_power: float = setting(1.0, r.NON_NEGATIVE, when=c.DEFAULT_SOFTMAX_SCALE)
    """Scores are divided by the channels of a head to this power; without MuP the power is 0.5."""
    mup_embedding_mult: float = setting(1.0, r.POSITIVE)
    """Factor on the embeddings."""
    mup_output_mult: float = setting(1.0, r.POSITIVE)
    """Factor on the logits; 1.0 means --mup-base-hidden-size / --hidden-size."""
