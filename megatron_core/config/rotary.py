"""Rotary positions: settings of their frequencies and of their scaling to longer sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RotaryConfig:
    """Rotary positions (Su et al. 2021) and how they are stretched."""

    rotary_base: float = 10000.0
    """Base of the rotary frequencies."""
    rotary_base_of_windows: float | None = None
    """Base in layers with the window of --window-size, if it is another one (Gemma 3); not scaled."""
    rotary_percent: float = 1.0
    """Fraction of each head's channels to which rotary positions apply."""
    rotary_interleaved: bool = False
    """Rotate channels 2i and 2i + 1 together (RoFormer, GPT-J); default i and i + half (Llama)."""
    rotary_seq_len_interpolation_factor: float | None = None
    """Divide positions by this, for longer sequences than the model was trained on (Chen et al. 2023); default: no."""
    use_rope_scaling: bool = False
    """Scale the frequencies by --rope-scaling-factor in the way of --rope-scaling-type."""
    rope_scaling_type: Literal["llama3", "yarn", "ntk", "dynamic"] = "llama3"
    """llama3: turn slow channels more slowly and fast ones as before (Llama 3.1). yarn: the same between other bounds,
    with longer queries and keys (Peng et al. 2023). ntk: a larger base (bloc97 2023). dynamic: the same with the factor
    that --max-position-embeddings needs, 1 up to the original length (emozilla 2023). Needs --use-rope-scaling."""
    rope_scaling_factor: float = 8.0
    """Factor of --use-rope-scaling; Llama 3.1: 8, Llama 3.2: 32."""
    original_max_position_embeddings: int | None = None
    """Positions that the model was trained on before --use-rope-scaling; default 8192 for llama3; ntk needs none."""
    yarn_beta_fast: float = 32.0
    """YaRN: channels with more turns than this over the original positions are not scaled."""
    yarn_beta_slow: float = 1.0
    """YaRN: channels with fewer turns than this over the original positions are scaled by the whole factor."""
    yarn_correction_range_round_to_int: bool = True
    """YaRN: round the channels at which scaling begins and ends outwards to whole numbers."""
    mscale: float = 1.0
    """YaRN: cosine and sine are multiplied by m(mscale) / m(mscale_all_dim), m(x) = 1 + 0.1 x ln(factor)."""
    mscale_all_dim: float = 0.0
    """YaRN: x of the divisor; see --mscale."""
    yarn_attention_factor: float | None = None
    """YaRN: multiply cosine and sine by this; default: as --mscale says."""
