"""Rotary positions: settings of frequencies, of their scaling, and of the layers that have them."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import Resume, given, section, setting


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.FUNCTION)
class RotaryConfig:
    """Rotary positions (Su et al. 2021) and their scaling to longer sequences."""

    rotary_base: float = setting(10000.0, r.POSITIVE, when=c.ROTARY, aliases="rotary_position_embeddings_theta")
    """Base of the rotary frequencies."""
    rotary_base_of_windows: float | None = setting(
        None, r.POSITIVE, needs=c.NO_LATENT_ATTENTION, when=(c.WINDOWED_LAYER, c.ROTARY, c.WINDOW)
    )
    """Base in layers with the window of --window-size, which is not scaled (Gemma 3); default: --rotary-base."""
    rotary_percent: float = setting(1.0, r.POSITIVE_UP_TO_1, when=c.ROTARY)
    """Fraction of each head's channels that have rotary positions."""
    no_rope_freq: tuple[int, ...] | None = setting(None, needs=c.ROTARY)
    """Layers without rotary positions (Llama 4, SmolLM3). One number n: every n-th layer. One number per layer: 1
    without, 0 with rotary positions; also an expression such as ([0]*3+[1])*12. Default: all layers have them."""
    attention_chunk_size: int | None = setting(None, r.SIZE, needs=(c.ROTARY, c.NO_LATENT_ATTENTION))
    """Layers with rotary positions attend within chunks of this number of tokens of a document (Llama 4); default:
    within whole documents."""
    query_temperature_scale: float = setting(0.0, r.NON_NEGATIVE, needs=(c.QUERY_TEMPERATURE, c.NO_LATENT_ATTENTION))
    """Scale a of the temperature in layers without rotary positions: the query at position p is multiplied by
    1 + a ln(1 + floor((p + 1) / --query-temperature-floor)) (Llama 4)."""
    query_temperature_floor: int = setting(8192, r.SIZE, needs=given("query_temperature_scale", "A"))
    """Positions after which the temperature of --query-temperature-scale changes."""
    query_temperature_of_rotary: bool = setting(False, needs=(c.ROTARY, given("query_temperature_scale", "A")))
    """Apply the temperature in the layers with rotary positions instead, with p in place of p + 1 (Ministral 3)."""
    rotary_interleaved: bool = setting(False, needs=c.NO_LATENT_ATTENTION, when=c.ROTARY)
    """Rotate channels 2i and 2i + 1 together (RoFormer, GPT-J); default: i and i + half (Llama)."""
    rotary_seq_len_interpolation_factor: float | None = setting(None, r.POSITIVE, needs=c.ROTARY)
    """Divide positions by this, for sequences longer than in training (Chen et al. 2023); default: no division."""
    use_rope_scaling: bool = setting(False, needs=c.ROTARY)
    """Scale the frequencies by --rope-scaling-factor with the method --rope-scaling-type."""
    rope_scaling_type: Literal["llama3", "yarn", "longrope", "ntk", "dynamic"] = setting("llama3", needs=c.ROPE_SCALING)
    """llama3: lower the frequencies of slow channels and keep the fast ones (Llama 3.1). yarn: as llama3 with other
    bounds, and longer queries and keys (Peng et al. 2023). longrope: divide each frequency by its own factor, one of
    --longrope-long-factor if the run's longest text (--seq-length in training, --max-length in generation) has more
    than --original-max-position-embeddings tokens, else of --longrope-short-factor (Ding et al. 2024). ntk: a larger
    base (bloc97 2023). dynamic: as ntk, with the factor that --max-position-embeddings needs, 1 up to the original
    length (emozilla 2023)."""
    rope_scaling_factor: float = setting(8.0, r.POSITIVE, when=c.ROPE_SCALING, aliases="rotary_scaling_factor")
    """Factor of --use-rope-scaling; 8 for Llama 3.1, 32 for Llama 3.2."""
    original_max_position_embeddings: int | None = setting(
        None,
        r.SIZE,
        when=(c.NOT_NTK, c.ROPE_SCALING),
        aliases="rope_scaling_original_max_position_embeddings yarn_original_max_position_embeddings",
    )
    """Number of positions in training before --use-rope-scaling; default: 8192 for llama3; not needed for ntk."""
    yarn_beta_fast: float = setting(32.0, r.POSITIVE, when=c.YARN, aliases="beta_fast")
    """YaRN: channels that make more than this number of turns over the original positions are not scaled."""
    yarn_beta_slow: float = setting(1.0, r.POSITIVE, when=c.YARN, aliases="beta_slow")
    """YaRN: channels that make fewer than this number of turns over the original positions are scaled fully."""
    yarn_correction_range_round_to_int: bool = setting(True, when=c.YARN)
    """YaRN: round the first and the last partly scaled channel outwards to integers."""
    mscale: float = setting(1.0, r.NON_NEGATIVE, when=(c.NO_YARN_FACTOR, c.YARN), aliases="rope_scaling_mscale")
    """YaRN: cosine and sine are multiplied by m(mscale) / m(mscale_all_dim), m(x) = 1 + 0.1 x ln(factor)."""
    mscale_all_dim: float = setting(
        0.0, r.NON_NEGATIVE, when=(c.SOFTMAX_SCALE_FROM_YARN, c.YARN), aliases="rope_scaling_mscale_all_dim"
    )
    """YaRN: the divisor of --mscale."""
    yarn_attention_factor: float | None = setting(None, r.POSITIVE, when=c.YARN)
    """YaRN: multiply cosine and sine by this; default: the factor from --mscale."""
    longrope_short_factor: tuple[float, ...] = setting((), needs=c.LONGROPE)
    """LongRoPE: a divisor of each rotary frequency, for texts up to the original positions."""
    longrope_long_factor: tuple[float, ...] = setting((), needs=c.LONGROPE)
    """LongRoPE: a divisor of each rotary frequency, for longer texts."""
    longrope_short_mscale: float | None = setting(None, r.POSITIVE, needs=c.LONGROPE)
    """LongRoPE: multiply cosine and sine by this for texts up to the original positions N; default:
    sqrt(1 + ln(--rope-scaling-factor) / ln(N))."""
    longrope_long_mscale: float | None = setting(None, r.POSITIVE, needs=c.LONGROPE)
    """LongRoPE: the same for longer texts."""

    @property
    def has_longrope(self) -> bool:
        """Whether the longest text of the run chooses the rotary frequencies."""
        return self.use_rope_scaling and self.rope_scaling_type == "longrope"
