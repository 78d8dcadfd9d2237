"""Settings of maximal update parametrization, and the factors that follow from them."""

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.model import ModelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Resume, given, section, setting, unless

DEFAULT_SOFTMAX_SCALE = unless("--softmax-scale", lambda run: run.model.softmax_scale is not None)


@dataclass(frozen=True, kw_only=True)
@section(needs=given("use_mup"), resume=Resume.FUNCTION)
class MuPConfig(ModelConfig):
    """Maximal update parametrization (Yang et al. 2022): hyperparameters tuned on a narrow model suit a wide one.

    With m = width / base width, the initial standard deviation of hidden matrices is init_method_std / sqrt(m), logits
    are divided by m, and attention scores by the channels of a head. ``OptimizerKind`` has the powers of m for rates.
    """

    use_mup: bool = setting(False, needs=c.NO_LATENT_ATTENTION)
    """Scale initial weights, attention, logits and learning rates with --hidden-size over --mup-base-hidden-size."""
    mup_base_hidden_size: int | None = setting(None, r.COUNT)
    """Width for which --lr was tuned; default: --hidden-size, so that only attention is scaled."""
    mup_base_head_dim: float | None = setting(None, r.POSITIVE, when=DEFAULT_SOFTMAX_SCALE)
    """Channels of a head of the base model; scores are multiplied by their square root; default: 1."""
    mup_attn_scale_power: float = setting(1.0, r.NON_NEGATIVE, when=DEFAULT_SOFTMAX_SCALE)
    """Scores are divided by the channels of a head to this power; without MuP the power is 0.5."""
    mup_embedding_mult: float = setting(1.0, r.POSITIVE)
    """Factor on the embeddings."""
    mup_output_mult: float = setting(1.0, r.POSITIVE)
    """Factor on the logits; 1.0 means --mup-base-hidden-size / --hidden-size."""

    @property
    def width_ratio(self) -> float:
        """Width / base width; 1 without ``use_mup``."""
        if not self.use_mup:
            return super().width_ratio
        return self.hidden_size / (self.mup_base_hidden_size or self.hidden_size)

    @property
    def attention_scale(self) -> float | None:
        """Factor on the products of queries and keys: by default 1 / channels of a head."""
        if self.softmax_scale is not None or not self.use_mup:
            return super().attention_scale
        return (self.mup_base_head_dim or 1.0) ** 0.5 / self.head_size**self.mup_attn_scale_power

    @property
    def embedding_factor(self) -> float:
        """Factor on the embeddings of words and positions."""
        return super().embedding_factor * (self.mup_embedding_mult if self.use_mup else 1.0)

    @property
    def logit_factor(self) -> float:
        """Factor on the logits."""
        if not self.use_mup:
            return super().logit_factor
        factor = self.mup_output_mult if self.mup_output_mult != 1.0 else 1.0 / self.width_ratio
        return super().logit_factor * factor

    @property
    def draws_head_as_embedding(self) -> bool:
        """Whether the output layer has initial weights as an embedding: they do not depend on the width."""
        return super().draws_head_as_embedding or self.use_mup


def mup_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Experts with projections of their inputs and outputs."""
    latent = config.optional("moe_latent_size")
    if config.model.section(MuPConfig).use_mup and latent is not None:
        yield (
            f"use_mup=True cannot be used with moe_latent_size={latent}: its multipliers are "
            "those of experts as wide as the hidden state; remove --use-mup"
        )
