"""Settings of layers with a recurrence, and of layers with one part each, a mixer or an MLP, in a pattern."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

from megatron_core.config import ranges as r
from megatron_core.config.model import ModelConfig
from megatron_core.config.setting import ALWAYS, Condition, Resume, given, section, setting

RECURRENCES = {"M": "mamba2", "G": "gated_delta_net", "H": "mamba2", "C": "short_convolution"}
"""Letter of a layer with a recurrence -> its kind in ``Feature.attention_kinds``."""
BOTH, DENSE, EXPERTS = "H", "-", "E"
"""Letters of layers with both attention and a Mamba-2 mixer, a dense MLP, or experts."""
FEED_FORWARDS = {DENSE: "mlp", EXPERTS: "experts"}
"""Letter of a layer with a feed-forward part -> its kind (``ModelConfig.feed_forward_name``)."""
MAMBA, ATTENTION = ("M", BOTH), ("*", BOTH)
"""Letters of layers with a Mamba-2 mixer, and with attention."""
CONVOLUTION = "C"
"""Letter of layers with a gated short convolution."""
LETTERS = ("M", "G", "*", BOTH, CONVOLUTION, DENSE, EXPERTS)
STAGE, AHEAD = "|", "/"
"""Further characters of Megatron-LM's patterns: end of a pipeline stage; start of a layer of multi-token prediction."""
LATENT: dict[str, dict[str, Any]] = {
    "+": {"multi_latent_attention": True},
    "D": {"multi_latent_attention": True, "experimental_attention_variant": "dsa"},
}
"""Its letters of layers with latent attention, and with sparse attention -> the settings that replace them."""
AHEAD_LAYERS = ("*-", "*E")
"""Parts of a layer of multi-token prediction: attention and an MLP, or experts."""


def read_pattern(text: str) -> tuple[str, dict[str, Any]]:
    """Return the letters of a pattern of Megatron-LM, one for each layer, and other settings that the pattern implies.

    ``M-|*M`` implies ``pipeline_model_parallel_layout="Ett|ttL"``, ``M+`` implies ``multi_latent_attention=True``,
    ``MD`` also ``experimental_attention_variant="dsa"``, ``M-/*-/*-`` implies ``mtp_num_layers=2`` and
    ``mtp_layer_pattern="*-"``. Layers of multi-token prediction that do not exist here stay in the pattern.
    """
    implied: dict[str, Any] = {}
    main, *ahead = text.split(AHEAD)
    parts = {*main, *"".join(ahead)}
    kinds = parts & {*LATENT, *ATTENTION}
    if len(kinds) == 1 and (kind := kinds.pop()) in LATENT:
        implied |= LATENT[kind]
        main, *ahead = (pattern.replace(kind, ATTENTION[0]) for pattern in (main, *ahead))
    if len({*ahead}) == 1 and ahead[0] in AHEAD_LAYERS:
        implied |= {"mtp_num_layers": len(ahead), "mtp_layer_pattern": ahead[0]}
        ahead = []
    stages = main.split(STAGE)
    if len(stages) > 1:
        counts = ("t" * n if n < 4 else f"t*{n}" for n in map(len, stages))
        predicting = "m" * implied.get("mtp_num_layers", 0)
        implied["pipeline_model_parallel_layout"] = f"E{STAGE.join(counts)}{predicting}L"
    return AHEAD.join(["".join(stages), *ahead]), implied


RECURRENT = replace(
    given("experimental_attention_variant", "gated_delta_net"),
    holds=lambda run: (
        run.model.experimental_attention_variant not in (None, "dsa") or "G" in (run.model.hybrid_layer_pattern or "")
    ),
)
PATTERN = given("hybrid_layer_pattern", "LETTERS")
A_MAMBA_LAYER = Condition("a Mamba layer (M or H) in --hybrid-layer-pattern", lambda run: run.model.may_be(*MAMBA))
A_MAMBA_2_LAYER = Condition(
    f"{A_MAMBA_LAYER.words}, and --mamba-mixer mamba2",
    lambda run: A_MAMBA_LAYER.holds(run) and run.model.mamba_mixer == "mamba2",
)
A_LAYER_WITH_BOTH = Condition("a layer H in --hybrid-layer-pattern", lambda run: run.model.may_be(BOTH))
ANY_RECURRENCE = Condition(
    "--experimental-attention-variant gated_delta_net, or M, H, G or C in --hybrid-layer-pattern",
    lambda run: A_MAMBA_LAYER.holds(run) or RECURRENT.holds(run) or run.model.may_be(CONVOLUTION),
)


@dataclass(frozen=True, kw_only=True)
@section(resume=Resume.TENSORS)
class HybridConfig(ModelConfig):
    """Layers with one norm, one part and one residual addition, of which some are Mamba-2 mixers (Dao and Gu 2024,
    arXiv 2405.21060; hybrid models: Waleffe et al. 2024, arXiv 2406.07887)."""

    hybrid_layer_pattern: str | None = setting(None, when=ALWAYS, aliases="hybrid_override_pattern")
    """Part of each layer, one letter per layer. M: Mamba-2; G: gated delta net; *: attention; H: attention and Mamba-2
    with the same input, whose outputs are added (Falcon-H1); C: gated short convolution (LFM2); -: MLP; E: experts.
    --num-layers follows from it. As in Megatron-LM, | ends a pipeline stage, +, in place of *, is an attention layer of
    --multi-latent-attention, D one that also has --experimental-attention-variant dsa, and /*- or /*E, once for each
    layer, adds layers of multi-token prediction (--mtp-num-layers, --mtp-layer-pattern). Default: every layer has
    attention (or a recurrence) and an MLP (or experts)."""
    mtp_layer_pattern: Literal["*-", "*E"] | None = setting(None, needs=PATTERN)
    """Parts of each layer of multi-token prediction in a model with --hybrid-layer-pattern: attention and an MLP (*-),
    or attention and experts (*E)."""
    mamba_mixer: Literal["mamba2", "gated_delta_product"] = setting("mamba2", needs=A_MAMBA_LAYER)
    """Recurrence of layers M: Mamba-2, or the gated delta product (Siems et al. 2025, arXiv 2502.10297), which updates
    the states of as many heads --gdp-num-householder times for each token; Megatron-LM's --spec with gdp_stack_spec."""
    gdp_num_householder: int = setting(
        3, r.SMALL_COUNT, needs=given("mamba_mixer", "gated_delta_product"), is_refinement=True
    )
    """Updates of a state by a gated delta product for each token."""
    mamba_state_dim: int = setting(128, r.SIZE, needs=A_MAMBA_LAYER)
    """Channels of B and C of a group: with --mamba-head-dim the size of a head's state."""
    mamba_head_dim: int = setting(64, r.SIZE, needs=A_MAMBA_LAYER)
    """Channels of a Mamba head."""
    mamba_num_groups: int = setting(8, r.SIZE, needs=A_MAMBA_LAYER)
    """Number of groups of Mamba heads; those of a group share B, C and a norm."""
    mamba_num_heads: int | None = setting(None, r.SIZE, needs=A_MAMBA_LAYER)
    """Number of Mamba heads; default: 2 x --hidden-size / --mamba-head-dim."""
    mamba_dt_min: float = setting(0.0, r.NON_NEGATIVE, needs=A_MAMBA_2_LAYER, resume=Resume.FUNCTION)
    """Smallest step dt of a Mamba head."""
    mamba_dt_max: float | None = setting(None, r.POSITIVE, needs=A_MAMBA_2_LAYER, resume=Resume.FUNCTION)
    """Largest step dt of a Mamba head; default: none."""
    mamba_output_norm: Literal["after_gate", "before_gate", "none"] = setting("after_gate", needs=A_MAMBA_LAYER)
    """Norm of the outputs of Mamba heads: of their product with the gates, before this product, or none (Falcon-H1)."""
    mamba_multipliers: tuple[float, float, float, float, float] = setting(
        (1.0, 1.0, 1.0, 1.0, 1.0), needs=A_MAMBA_2_LAYER, resume=Resume.FUNCTION
    )
    """Factors on the projections of a Mamba mixer to inputs, B, C, gates and steps (Falcon-H1)."""
    parallel_mixer_multipliers: tuple[float, float] = setting(
        (1.0, 1.0), needs=A_LAYER_WITH_BOTH, resume=Resume.FUNCTION
    )
    """Factors on the outputs of attention and of the Mamba mixer in layers H (Falcon-H1)."""
    linear_conv_kernel_dim: int = setting(4, r.SMALL_COUNT, needs=ANY_RECURRENCE)
    """Tokens of the causal convolution before a recurrence, and of the one of a layer C."""

    def letter_of(self, layer_number: int) -> str | None:
        """The letter of a layer (numbered from 0), both of a multi-token prediction layer; None without a pattern."""
        pattern = self.hybrid_layer_pattern
        if pattern and self.mtp_layer_pattern and layer_number >= len(pattern):
            return self.mtp_layer_pattern
        return pattern[min(layer_number, len(pattern) - 1)] if pattern else None

    def has_part(self, layer_number: int, letters: Iterable[str]) -> bool:
        """Whether a layer (numbered from 0) has one of the parts ``letters``: always without a pattern."""
        parts = self.letter_of(layer_number)
        return parts is None or any(letter in letters for letter in parts)

    def may_have(self, *letters: str) -> bool:
        """Whether a layer may have one of the parts ``letters``: always without a pattern."""
        pattern = self.hybrid_layer_pattern
        return not pattern or any(letter in pattern + (self.mtp_layer_pattern or "") for letter in letters)

    @property
    def may_have_attention(self) -> bool:
        """Whether a layer may have attention."""
        return self.may_have(*ATTENTION)

    @property
    def may_have_mlp(self) -> bool:
        """Whether a layer may have an MLP or experts."""
        return self.may_have(DENSE, EXPERTS)

    def may_have_feed_forward(self, name: str) -> bool:
        """Whether a layer may have a feed-forward part of this kind."""
        return self.may_have(*(letter for letter, kind in FEED_FORWARDS.items() if kind == name))

    @property
    def has_mamba(self) -> bool:
        """Whether a layer has a Mamba-2 mixer."""
        return any(letter in (self.hybrid_layer_pattern or "") for letter in MAMBA)

    @property
    def sizes_over_ranks(self) -> tuple[str, ...]:
        """The settings with sizes of recurrences that tensor parallelism must split evenly."""
        has_convolution = CONVOLUTION in (self.hybrid_layer_pattern or "")
        return ("mamba_num_groups",) * self.has_mamba + ("hidden_size",) * has_convolution

    def may_be(self, *letters: str) -> bool:
        """Whether a pattern has ``letters``, or unknown ones or none, which are refused themselves."""
        pattern = self.hybrid_layer_pattern
        return pattern is not None and (not pattern or not set(pattern) <= {*LETTERS} - {*letters})

    @property
    def parts_per_layer(self) -> int:
        """1 with a pattern."""
        return super().parts_per_layer if self.hybrid_layer_pattern is None else 1

    def has_mixer(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has attention or a recurrence."""
        return super().has_mixer(layer_number) and self.has_part(layer_number, (*ATTENTION, *RECURRENCES))

    def has_attention(self, layer_number: int) -> bool:
        """Whether a layer (numbered from 0) has attention."""
        letter = self.letter_of(layer_number)
        return super().has_attention(layer_number) if letter is None else any(part in ATTENTION for part in letter)

    def feed_forward_name(self, layer_number: int) -> str | None:
        """The kind of the feed-forward part of a layer (numbered from 0); None: the layer has none."""
        letters = self.letter_of(layer_number)
        if letters is None:
            return super().feed_forward_name(layer_number)
        return next((kind for letter, kind in FEED_FORWARDS.items() if letter in letters), None)

    def recurrence_of(self, layer_number: int) -> str | None:
        """The kind of the recurrence of a layer (numbered from 0); None: it has attention alone or no mixer."""
        letter = self.letter_of(layer_number)
        if letter == "M":
            return self.mamba_mixer
        return super().recurrence_of(layer_number) if letter is None else RECURRENCES.get(letter)


@dataclass(frozen=True, kw_only=True)
@section(needs=RECURRENT, resume=Resume.TENSORS)
class RecurrentConfig(HybridConfig):
    """Layers with a state of fixed size that each token updates, in place of attention over all earlier tokens."""

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

    def recurrence_of(self, layer_number: int) -> str | None:
        """The kind of the recurrence of a layer (numbered from 0); None: it has attention alone or no mixer."""
        frequency = self.linear_attention_freq
        if self.hybrid_layer_pattern is not None or frequency is None:
            return super().recurrence_of(layer_number)
        layer_number = min(layer_number, self.num_layers - 1)
        is_chosen = (layer_number + 1) % frequency[0] != 0 if len(frequency) == 1 else frequency[layer_number] == 1
        return self.experimental_attention_variant if is_chosen else None
