"""Settings and rules of further kinds of positions."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.attention import attention_of
from megatron_core.config.model import ModelConfig
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Condition, Resume, given, section, setting, unless

ROPE_SCALING = given("use_rope_scaling")
NOT_NTK = Condition("another --rope-scaling-type", lambda run: run.model.rope_scaling_type != "ntk")
YARN = Condition("--rope-scaling-type yarn", lambda run: run.model.is_scaled_by("yarn"))
LONGROPE = Condition("--rope-scaling-type longrope", lambda run: run.model.is_scaled_by("longrope"))
NO_YARN_FACTOR = unless("--yarn-attention-factor", lambda run: run.model.yarn_attention_factor is not None)
SOFTMAX_SCALE_FROM_YARN = unless(
    "--yarn-attention-factor",
    lambda run: (
        run.model.yarn_attention_factor is not None
        and not (run.optional("multi_latent_attention") and run.model.softmax_scale is None)
    ),
)

QUERY_TEMPERATURE = Condition(
    "--no-rope-freq N or --query-temperature-of-rotary",
    lambda run: run.model.no_rope_freq or run.model.query_temperature_of_rotary,
)
BIAS_CHANNELS = 8
"""Further channels of queries and keys for linear biases; kernels need multiples of 8."""


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FUNCTION)
class PositionConfig(ModelConfig):
    """Scaling of rotary frequencies to longer sequences, and the temperature of queries."""

    rotary_seq_len_interpolation_factor: float | None = setting(None, r.POSITIVE, needs=c.ROTARY)
    """Divide positions by this, for sequences longer than in training (Chen et al. 2023); default: no division."""
    use_rope_scaling: bool = setting(False, needs=c.ROTARY)
    """Scale the frequencies by --rope-scaling-factor with the method --rope-scaling-type."""
    rope_scaling_type: Literal["llama3", "yarn", "longrope", "ntk", "dynamic"] = setting("llama3", needs=ROPE_SCALING)
    """llama3: lower the frequencies of slow channels and keep the fast ones (Llama 3.1). yarn: as llama3 with other
    bounds, and longer queries and keys (Peng et al. 2023). longrope: divide each frequency by its own factor, one of
    --longrope-long-factor if the run's longest text (--seq-length in training, --max-length in generation) has more
    than --original-max-position-embeddings tokens, else of --longrope-short-factor (Ding et al. 2024). ntk: a larger
    base (bloc97 2023). dynamic: as ntk, with the factor that --max-position-embeddings needs, 1 up to the original
    length (emozilla 2023)."""
    rope_scaling_factor: float = setting(8.0, r.POSITIVE, when=ROPE_SCALING, aliases="rotary_scaling_factor")
    """Factor of --use-rope-scaling; 8 for Llama 3.1, 32 for Llama 3.2."""
    original_max_position_embeddings: int | None = setting(
        None,
        r.SIZE,
        when=(NOT_NTK, ROPE_SCALING),
        aliases="rope_scaling_original_max_position_embeddings yarn_original_max_position_embeddings",
    )
    """Number of positions in training before --use-rope-scaling; default: 8192 for llama3; not needed for ntk."""
    yarn_beta_fast: float = setting(32.0, r.POSITIVE, when=YARN, aliases="beta_fast")
    """YaRN: channels that make more than this number of turns over the original positions are not scaled."""
    yarn_beta_slow: float = setting(1.0, r.POSITIVE, when=YARN, aliases="beta_slow")
    """YaRN: channels that make fewer than this number of turns over the original positions are scaled fully."""
    yarn_correction_range_round_to_int: bool = setting(True, when=YARN)
    """YaRN: round the first and the last partly scaled channel outwards to integers."""
    mscale: float = setting(1.0, r.NON_NEGATIVE, when=(NO_YARN_FACTOR, YARN), aliases="rope_scaling_mscale")
    """YaRN: cosine and sine are multiplied by m(mscale) / m(mscale_all_dim), m(x) = 1 + 0.1 x ln(factor)."""
    mscale_all_dim: float = setting(
        0.0, r.NON_NEGATIVE, when=(SOFTMAX_SCALE_FROM_YARN, YARN), aliases="rope_scaling_mscale_all_dim"
    )
    """YaRN: the divisor of --mscale."""
    yarn_attention_factor: float | None = setting(None, r.POSITIVE, when=YARN)
    """YaRN: multiply cosine and sine by this; default: the factor from --mscale."""
    longrope_short_factor: tuple[float, ...] = setting((), needs=LONGROPE)
    """LongRoPE: a divisor of each rotary frequency, for texts up to the original positions."""
    longrope_long_factor: tuple[float, ...] = setting((), needs=LONGROPE)
    """LongRoPE: a divisor of each rotary frequency, for longer texts."""
    longrope_short_mscale: float | None = setting(None, r.POSITIVE, needs=LONGROPE)
    """LongRoPE: multiply cosine and sine by this for texts up to the original positions N; default:
    sqrt(1 + ln(--rope-scaling-factor) / ln(N))."""
    longrope_long_mscale: float | None = setting(None, r.POSITIVE, needs=LONGROPE)
    """LongRoPE: the same for longer texts."""

    query_temperature_scale: float = setting(0.0, r.NON_NEGATIVE, needs=(QUERY_TEMPERATURE, c.NO_LATENT_ATTENTION))
    """Scale a of the temperature in layers without rotary positions: the query at position p is multiplied by
    1 + a ln(1 + floor((p + 1) / --query-temperature-floor)) (Llama 4)."""
    query_temperature_floor: int = setting(8192, r.SIZE, needs=given("query_temperature_scale", "A"))
    """Positions after which the temperature of --query-temperature-scale changes."""
    query_temperature_of_rotary: bool = setting(False, needs=(c.ROTARY, given("query_temperature_scale", "A")))
    """Apply the temperature in the layers with rotary positions instead, with p in place of p + 1 (Ministral 3)."""

    @property
    def attention_steps(self) -> tuple[str, ...]:
        """The steps of grouped-query attention for the temperature and for linear biases."""
        steps = super().attention_steps
        if self.query_temperature_scale:
            steps += ("megatron_core.features.positions.temperature:QueryTemperature",)
        return (*steps, "megatron_core.features.positions.linear_bias:LinearBias") if self.bias_channels else steps

    @property
    def bias_channels(self) -> int:
        """Further channels of queries and keys for linear biases."""
        return BIAS_CHANNELS if self.position_embedding_type == "alibi" else super().bias_channels

    @property
    def rotary_scaling(self) -> str | None:
        """The function of the scaled frequencies."""
        if self.use_rope_scaling or self.rotary_seq_len_interpolation_factor is not None:
            return "megatron_core.features.positions.frequencies:scaled_frequencies"
        return super().rotary_scaling

    @property
    def rotary_score_factor(self) -> float:
        """m(mscale_all_dim)^2 with YaRN, whose rotary table is divided by m (DeepSeek-V2's code)."""
        if self.is_scaled_by("yarn"):
            return self.yarn_mscale(self.mscale_all_dim) ** 2
        return super().rotary_score_factor

    @property
    def longest_text_scales_rotary(self) -> bool:
        """Whether the longest text of the run chooses the rotary frequencies."""
        return self.is_scaled_by("longrope") or super().longest_text_scales_rotary

    def is_scaled_by(self, *methods: str) -> bool:
        """Whether one of these methods scales the frequencies."""
        return self.use_rope_scaling and self.rope_scaling_type in methods

    def yarn_mscale(self, mscale: float) -> float:
        """1 + 0.1 mscale ln(factor), or 1 if factor <= 1."""
        factor = self.rope_scaling_factor
        return 1.0 if factor <= 1.0 else 1.0 + 0.1 * mscale * math.log(factor)

    @property
    def yarn_magnitude(self) -> float:
        """YaRN's factor on cosine and sine, which keeps attention sharp on longer sequences (equation 22)."""
        if self.yarn_attention_factor is not None:
            return self.yarn_attention_factor
        return self.yarn_mscale(self.mscale) / self.yarn_mscale(self.mscale_all_dim)


def position_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that contradict linear biases or the scaling of rotary positions, or that it lacks."""
    model = config.model.section(PositionConfig)
    if model.position_embedding_type == "alibi":
        excluded = {
            "multi_latent_attention": config.optional("multi_latent_attention"),
            "attn_logit_softcapping": model.attn_logit_softcapping,
            "layout_invariant": config.parallel.layout_invariant,
        }
        for name, value in excluded.items():
            if value:
                yield (
                    f"position_embedding_type=alibi cannot be used with {name}={value}; remove it, or use "
                    "--position-embedding-type rope"
                )
        if config.data.reset_position_ids and not config.data.reset_attention_mask:
            yield (
                "position_embedding_type=alibi cannot be used with reset_position_ids=True alone: keys of earlier "
                "documents would have higher positions than the query; add --reset-attention-mask, or remove "
                "--reset-position-ids"
            )
    attention = attention_of(model)
    method = model.rope_scaling_type
    rotating = attention.rotary_channels if 0 < model.rotary_percent <= 1 and model.num_attention_heads >= 1 else 0
    if rotating == 2 and model.is_scaled_by("ntk", "dynamic"):
        yield f"rope_scaling_type={method} needs 4 or more rotating channels in a head, not 2"
    elif rotating >= 2 and rotating % 2 == 0 and model.is_scaled_by("longrope"):
        for name in ("longrope_short_factor", "longrope_long_factor"):
            factors, flag, pairs = getattr(model, name), f"--{name.replace('_', '-')}", rotating // 2
            if len(factors) != pairs:
                yield (
                    f"{name} has {len(factors)} numbers; rope_scaling_type=longrope needs one for each of the {pairs} "
                    f"rotary frequencies of a head; give {flag} and {pairs} numbers"
                )
            if wrong := [factor for factor in factors if not 0 < factor <= 3e38]:
                yield f"{name} has {wrong[0]}, which is out of range; each must be a number > 0 and <= 3e+38"
        if model.original_max_position_embeddings == 1:
            yield "original_max_position_embeddings=1 is too few for rope_scaling_type=longrope; give 2 or more"
    if model.is_scaled_by("yarn", "longrope", "dynamic") and model.original_max_position_embeddings is None:
        yield (
            f"rope_scaling_type={method} needs original_max_position_embeddings, the positions that the model was "
            "trained on; add --original-max-position-embeddings N"
        )
    if model.use_rope_scaling and model.yarn_beta_fast <= model.yarn_beta_slow:
        yield (
            f"yarn_beta_fast={model.yarn_beta_fast} must be more than yarn_beta_slow={model.yarn_beta_slow}; "
            "the defaults are 32 and 1"
        )
