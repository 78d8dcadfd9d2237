"""Layers with one part each, a mixer or an MLP, in the order of a pattern; settings of Mamba-2 mixers."""

from dataclasses import dataclass
from typing import Any, Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, Resume, section, setting

RECURRENCES = {"M": "mamba2", "G": "gated_delta_net", "H": "mamba2", "C": "short_convolution"}
"""Letter of a layer with a recurrence -> its kind in ``config.mixers.RECURRENT_KINDS``."""
BOTH, DENSE, EXPERTS = "H", "-", "E"
"""Letters of layers with both attention and a Mamba-2 mixer, a dense MLP, or experts."""
MAMBA, ATTENTION = ("M", BOTH), ("*", BOTH)
"""Letters of layers with a Mamba-2 mixer, and with attention."""
CONVOLUTION = "C"
"""Letter of layers with a gated short convolution."""
LETTERS = ("M", "G", "*", BOTH, CONVOLUTION, DENSE, EXPERTS)
STAGE, LATENT = "|", "+"
"""Further characters of Megatron-LM's patterns: end of a pipeline stage; layer with multi-head latent attention."""


def read_pattern(text: str) -> tuple[str, dict[str, Any]]:
    """Return the letters of a pattern of Megatron-LM, one for each layer, and other settings that the pattern implies.

    ``M-|*M`` implies ``pipeline_model_parallel_layout="Ett|ttL"``, ``M+`` implies ``multi_latent_attention=True``.
    """
    implied: dict[str, Any] = {}
    main, slash, ahead = text.partition("/")  # followed by layers of multi-token prediction
    stages = main.split(STAGE)
    if len(stages) > 1:
        counts = ("t" * n if n < 4 else f"t*{n}" for n in map(len, stages))
        implied["pipeline_model_parallel_layout"] = f"E{STAGE.join(counts)}L"
    letters = "".join([*stages, slash, ahead])
    if LATENT in letters and not set(ATTENTION) & set(letters):
        implied["multi_latent_attention"] = True
        letters = letters.replace(LATENT, ATTENTION[0])
    return letters, implied


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.TENSORS)
class HybridConfig:
    """Layers with one norm, one part and one residual addition, of which some are Mamba-2 mixers (Dao and Gu 2024,
    arXiv 2405.21060; hybrid models: Waleffe et al. 2024, arXiv 2406.07887)."""

    hybrid_layer_pattern: str | None = setting(None, when=ALWAYS, aliases="hybrid_override_pattern")
    """Part of each layer, one letter per layer. M: Mamba-2; G: gated delta net; *: attention; H: attention and Mamba-2
    with the same input, whose outputs are added (Falcon-H1); C: gated short convolution (LFM2); -: MLP; E: experts.
    --num-layers follows from it. As in Megatron-LM, | ends a pipeline stage, and +, in place of *, is an attention
    layer of --multi-latent-attention. Default: every layer has attention (or a recurrence) and an MLP (or experts)."""
    mamba_state_dim: int = setting(128, r.SIZE, needs=c.MAMBA)
    """Channels of B and C of a group: with --mamba-head-dim the size of a head's state."""
    mamba_head_dim: int = setting(64, r.SIZE, needs=c.MAMBA)
    """Channels of a Mamba head."""
    mamba_num_groups: int = setting(8, r.SIZE, needs=c.MAMBA)
    """Number of groups of Mamba heads; those of a group share B, C and a norm."""
    mamba_num_heads: int | None = setting(None, r.SIZE, needs=c.MAMBA)
    """Number of Mamba heads; default: 2 x --hidden-size / --mamba-head-dim."""
    mamba_dt_min: float = setting(0.0, r.NON_NEGATIVE, needs=c.MAMBA, resume=Resume.FUNCTION)
    """Smallest step dt of a Mamba head."""
    mamba_dt_max: float | None = setting(None, r.POSITIVE, needs=c.MAMBA, resume=Resume.FUNCTION)
    """Largest step dt of a Mamba head; default: none."""
    mamba_output_norm: Literal["after_gate", "before_gate", "none"] = setting("after_gate", needs=c.MAMBA)
    """Norm of the outputs of Mamba heads: of their product with the gates, before this product, or none (Falcon-H1)."""
    mamba_multipliers: tuple[float, float, float, float, float] = setting(
        (1.0, 1.0, 1.0, 1.0, 1.0), needs=c.MAMBA, resume=Resume.FUNCTION
    )
    """Factors on the projections of a Mamba mixer to inputs, B, C, gates and steps (Falcon-H1)."""
    parallel_mixer_multipliers: tuple[float, float] = setting((1.0, 1.0), needs=c.BOTH, resume=Resume.FUNCTION)
    """Factors on the outputs of attention and of the Mamba mixer in layers H (Falcon-H1)."""
    linear_conv_kernel_dim: int = setting(4, r.SMALL_COUNT, needs=c.ANY_RECURRENCE)
    """Tokens of the causal convolution before a recurrence, and of the one of a layer C."""

    def letter_of(self, layer_number: int) -> str | None:
        """The letter of a layer (numbered from 0); None without a pattern."""
        pattern = self.hybrid_layer_pattern
        return pattern[min(layer_number, len(pattern) - 1)] if pattern else None

    def may_have(self, *letters: str) -> bool:
        """Whether a layer may have one of the parts ``letters``: always without a pattern."""
        return not self.hybrid_layer_pattern or any(letter in self.hybrid_layer_pattern for letter in letters)

    @property
    def may_have_attention(self) -> bool:
        """Whether a layer may have attention."""
        return self.may_have(*ATTENTION)

    @property
    def has_mamba(self) -> bool:
        """Whether a layer has a Mamba-2 mixer."""
        return any(letter in (self.hybrid_layer_pattern or "") for letter in MAMBA)

    def may_be(self, *letters: str) -> bool:
        """Whether a pattern has ``letters``, or unknown ones or none, which are refused themselves."""
        pattern = self.hybrid_layer_pattern
        return pattern is not None and (not pattern or not set(pattern) <= {*LETTERS} - {*letters})

    def has_mixer(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has attention or a recurrence."""
        return self.letter_of(layer_number) in (None, *ATTENTION, *RECURRENCES)

    def has_mlp(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has an MLP or experts."""
        return self.letter_of(layer_number) in (None, DENSE, EXPERTS)
