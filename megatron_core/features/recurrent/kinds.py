"""The kinds of recurrences.

To add a recurrence, add a subclass of ``RecurrenceKind``, its name and its layer to the feature, and its name or
its letter to ``settings``.
"""

from dataclasses import replace
from typing import ClassVar

from megatron_core.config.attention import AttentionKind, Projection, attention_of
from megatron_core.config.model import ModelConfig
from megatron_core.features.recurrent.settings import RecurrentConfig


class RecurrenceKind(AttentionKind):
    """A recurrence instead of attention, after a convolution. Its heads have their own numbers and sizes."""

    has_own_head_sizes = True
    model: RecurrentConfig
    convolution_has_bias: ClassVar[bool] = False
    convolution_has_silu: ClassVar[bool] = True
    updates: int = 1
    """Updates of a state for each token."""
    widths: ClassVar[tuple[str, str]]
    """Formulas of the outputs of the input projection, and of the inputs of the output projection, for messages."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model.section(RecurrentConfig))

    @property
    def heads(self) -> int:
        """Number of heads, each with a state, over all ranks."""
        raise NotImplementedError

    @property
    def groups(self) -> int:
        """Number of query and key heads over all ranks, each of which serves several adjacent heads."""
        raise NotImplementedError

    @property
    def pieces(self) -> tuple[int, ...]:
        """Channels of the parts of the input projections over all ranks, the convolved ones first."""
        raise NotImplementedError

    @property
    def convolved_pieces(self) -> tuple[int, ...]:
        """Channels of the parts of the convolution's input over all ranks."""
        return self.pieces[:3]

    @property
    def decay_channels(self) -> int:
        """Channels of a decay: 1, or with a decay for each channel of a key their number."""
        return 1

    @property
    def transition_elements(self) -> int:
        """Numbers of the transition of a head's state over a part of a sequence."""
        return self.query_head_size * (self.query_head_size + self.value_head_size)

    @property
    def convolved(self) -> int:
        """Channels of the convolution over all ranks."""
        return sum(self.convolved_pieces)

    @property
    def has_rotary(self) -> bool:
        """False: the order of tokens is that of the recurrence."""
        return False

    def cached_elements(self, tp: int) -> int:
        """0: the cache does not grow with the text."""
        return 0

    def state_elements(self, tp: int) -> int:
        """The states of a rank's heads, and the tokens before the next one that its convolution reads."""
        states = self.heads // tp * self.query_head_size * self.value_head_size
        return states + self.convolved // tp * (self.model.linear_conv_kernel_dim - 1)

    def projections(self, tp: int) -> list[Projection]:
        """One projection to all ``pieces``, and the output projection."""
        hidden = self.model.hidden_size
        pieces = tuple(piece // tp for piece in self.pieces)
        values = self.heads * self.value_head_size // tp
        width, of_values = self.widths
        return [
            Projection(hidden, sum(pieces), "outputs", False, width, "in_proj", pieces=pieces),
            Projection(values, hidden, "inputs", False, of_values, "out_proj"),
        ]

    def norms(self, tp: int) -> tuple[int, ...]:
        """None: the norm of outputs is always an RMSNorm, see ``vectors``."""
        return ()

    def saved(self) -> tuple[int, int]:
        """All pieces; the convolution's input and output before and after silu; the gated outputs of the heads. The
        recurrence with the norm and the gate is computed again."""
        convolved = 0 if self.model.recomputes("core_attn") else 3 * self.convolved
        return 0, sum(self.pieces) + convolved + self.heads * self.value_head_size


class GatedDeltaNetKind(RecurrenceKind):
    """A convolution of queries, keys and values, and the gated delta rule (Yang et al. 2025, arXiv 2412.06464)."""

    name = "gated_delta_net"
    widths = "2 (key heads x channels + value heads x channels + value heads)", "value heads x channels"

    @property
    def heads(self) -> int:
        """Value heads."""
        return self.model.linear_num_value_heads

    @property
    def groups(self) -> int:
        """Key heads."""
        return self.model.linear_num_key_heads

    @property
    def query_head_size(self) -> int:
        """Channels of a query or key head."""
        return self.model.linear_key_head_dim

    @property
    def value_head_size(self) -> int:
        """Channels of a value head."""
        return self.model.linear_value_head_dim

    @property
    def pieces(self) -> tuple[int, int, int, int, int, int]:
        """Channels of queries, keys, values, gates of the output, update rates and decays over all ranks."""
        model = self.model
        keys = model.linear_num_key_heads * model.linear_key_head_dim
        values = model.linear_num_value_heads * model.linear_value_head_dim
        return keys, keys, values, values, model.linear_num_value_heads, model.linear_num_value_heads

    @property
    def centers_outputs(self) -> bool:
        """Whether the norm of a head's output is a layer norm with a bias, instead of an RMS norm."""
        return self.model.normalization == "LayerNorm"

    def vectors(self, tp: int) -> int:
        """Weights of the convolution, of decays (two per head) and of the norm of a head's output."""
        model = self.model
        convolution = self.convolved // tp * model.linear_conv_kernel_dim
        norm = self.value_head_size * (1 + self.centers_outputs)
        return convolution + (model.linear_num_value_heads + self.pieces[5]) // tp + norm

    def score_flops(self, keys: int) -> tuple[int, int]:
        """The recurrence, as Megatron-LM counts it: convolution; four products of ``[dk, dv]`` and token per head."""
        model = self.model
        state = self.query_head_size * self.value_head_size * model.linear_num_value_heads
        return 2 * self.convolved * model.linear_conv_kernel_dim, 8 * state


class KimiDelta(GatedDeltaNetKind):
    """The gated delta net with a decay for each key channel of a head, and with gates and decays that are projections
    of few channels (Kimi Team 2025, arXiv 2510.26692, section 3)."""

    centers_outputs = False
    name = "kimi_delta_attention"

    @property
    def decay_channels(self) -> int:
        """Channels of a key."""
        return self.query_head_size

    @property
    def rank(self) -> int:
        """Channels between the two projections to gates, and between those to decays."""
        return self.value_head_size

    @property
    def pieces(self) -> tuple[int, int, int, int, int, int]:
        """As the gated delta net, with as many decays as keys."""
        *kept_pieces, _ = super().pieces
        keys, _, values, gates, rates = kept_pieces
        return keys, keys, values, gates, rates, keys

    def projections(self, tp: int) -> list[Projection]:
        """To queries, keys, values and rates; to decays and to gates, each in two steps; and the output projection."""
        hidden = self.model.hidden_size
        (keys, _, values, gates, rates, decays) = self.pieces
        up = "value heads x channels"
        width = "2 key heads x channels + value heads x channels + value heads"
        pieces = tuple(piece // tp for piece in (keys, keys, values, rates))
        return [
            Projection(hidden, sum(pieces), "outputs", False, width, "in_proj", pieces=pieces),
            Projection(hidden, self.rank, module="f_a_proj"),
            Projection(self.rank, decays // tp, "outputs", False, "key heads x channels", "f_b_proj"),
            Projection(hidden, self.rank, module="g_a_proj"),
            Projection(self.rank, gates // tp, "outputs", False, up, "g_b_proj"),
            Projection(values // tp, hidden, "inputs", False, up, "out_proj"),
        ]

    def saved(self) -> tuple[int, int]:
        """As the gated delta net, and the inputs of the second projections to gates and decays."""
        _, of_heads = super().saved()
        return 2 * self.rank, of_heads


class Mamba2(RecurrenceKind):
    """A convolution of inputs, keys (B) and queries (C), and a state space of each head (Dao and Gu 2024, arXiv
    2405.21060)."""

    name = "mamba2"
    widths = "2 heads x channels + 2 groups x states + heads", "heads x channels"
    convolution_has_bias = True
    has_skip: ClassVar[bool] = True
    """Whether a head's input, times its factor D, is added to its output."""

    @property
    def heads(self) -> int:
        """Number of heads after defaults."""
        model = self.model
        return model.mamba_num_heads or 2 * model.hidden_size // model.mamba_head_dim

    @property
    def groups(self) -> int:
        """Groups of heads that share B and C."""
        return self.model.mamba_num_groups

    @property
    def query_head_size(self) -> int:
        """Channels of B and C of a group."""
        return self.model.mamba_state_dim

    @property
    def value_head_size(self) -> int:
        """Channels of a head."""
        return self.model.mamba_head_dim

    @property
    def pieces(self) -> tuple[int, ...]:
        """Channels of inputs, B, C, gates of the output and steps over all ranks."""
        inputs = self.heads * self.value_head_size
        keys = self.groups * self.query_head_size
        return inputs, keys, keys, inputs, self.heads

    @property
    def transition_elements(self) -> int:
        """A number as factor, and the state."""
        return 1 + self.query_head_size * self.value_head_size

    def vectors(self, tp: int) -> int:
        """Weights and biases of the convolution; decay, step and D of each head; the norm of outputs."""
        convolution = self.convolved * (self.model.linear_conv_kernel_dim + self.convolution_has_bias)
        norm = self.heads * self.value_head_size * (self.model.mamba_output_norm != "none")
        return (convolution + (2 + self.has_skip) * self.heads + norm) // tp

    def score_flops(self, keys: int) -> tuple[int, int]:
        """7 for each element of the states and token, as Megatron-LM counts the recurrence."""
        return 0, 7 * self.pieces[0] * self.query_head_size


class GatedDeltaProductKind(Mamba2):
    """A convolution of values, keys and queries, and several updates of a state by the gated delta rule for each token
    (Siems et al. 2025, arXiv 2502.10297); heads and groups are those of Mamba-2."""

    name = "gated_delta_product"
    widths = "(N + 1) (heads x channels + groups x states + heads) with N updates", "heads x channels"
    convolution_has_bias = False
    has_skip = False

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.updates = self.model.gdp_num_householder

    @property
    def pieces(self) -> tuple[int, ...]:
        """Channels of the values and of the keys of each update, of queries, of gates of the output, of the rates of
        each update, and of decays, over all ranks."""
        values = self.heads * self.value_head_size
        keys = self.groups * self.query_head_size
        n = self.updates
        return *(values,) * n, *(keys,) * (n + 1), values, *(self.heads,) * (n + 1)

    @property
    def convolved_pieces(self) -> tuple[int, ...]:
        """Values, keys and queries."""
        return self.pieces[: 2 * self.updates + 1]

    @property
    def transition_elements(self) -> int:
        """A matrix as factor, and the state."""
        return self.query_head_size * (self.query_head_size + self.value_head_size)

    def score_flops(self, keys: int) -> tuple[int, int]:
        """As Megatron-LM counts them: convolution; 4 for each update and 3 more for each element of the states."""
        state = self.heads * self.value_head_size * self.query_head_size
        return 2 * self.convolved * self.model.linear_conv_kernel_dim, (4 * self.updates + 3) * state


class ShortConvolutionKind(RecurrenceKind):
    """A gated causal convolution over few tokens (Liquid AI 2025, arXiv 2511.23404): a recurrence without states, whose
    heads are the channels of the hidden state."""

    name = "short_convolution"
    widths = "3 channels", "channels"
    convolution_has_silu = False

    @property
    def heads(self) -> int:
        """One for each channel."""
        return self.model.hidden_size

    @property
    def groups(self) -> int:
        """As heads."""
        return self.heads

    @property
    def query_head_size(self) -> int:
        """0: there is no state."""
        return 0

    @property
    def value_head_size(self) -> int:
        """1."""
        return 1

    @property
    def pieces(self) -> tuple[int, int, int]:
        """Channels of the gates before and after the convolution, and of its input, over all ranks."""
        return self.heads, self.heads, self.heads

    @property
    def convolved_pieces(self) -> tuple[int]:
        """The input of the convolution times its gates."""
        return (self.heads,)

    def vectors(self, tp: int) -> int:
        """Weights of the convolution."""
        return self.convolved * self.model.linear_conv_kernel_dim // tp

    def score_flops(self, keys: int) -> tuple[int, int]:
        """The convolution."""
        return 2 * self.convolved * self.model.linear_conv_kernel_dim, 0

    def saved(self) -> tuple[int, int]:
        """All pieces, the convolution's input and output, and the gated output."""
        convolved = 0 if self.model.recomputes("core_attn") else 2 * self.convolved
        return 0, sum(self.pieces) + convolved + self.heads


class AttentionAndMamba(AttentionKind):
    """Attention and a Mamba-2 mixer of the same input; their outputs are added (Zuo et al. 2025, arXiv 2507.22448)."""

    name = "attention_and_mamba2"

    def __init__(self, model: ModelConfig) -> None:
        super().__init__(model)
        self.mixers = {"attention": attention_of(model), "recurrence": Mamba2(model)}

    @property
    def has_rotary(self) -> bool:
        """As attention."""
        return self.mixers["attention"].has_rotary

    def cached_elements(self, tp: int) -> int:
        """As attention."""
        return sum(mixer.cached_elements(tp) for mixer in self.mixers.values())

    def state_elements(self, tp: int) -> int:
        """As the mixer."""
        return sum(mixer.state_elements(tp) for mixer in self.mixers.values())

    def vectors(self, tp: int) -> int:
        """The sum over both."""
        return sum(mixer.vectors(tp) for mixer in self.mixers.values())

    def frozen_vectors(self) -> int:
        """The sum over both."""
        return sum(mixer.frozen_vectors() for mixer in self.mixers.values())

    def score_flops(self, keys: int) -> tuple[int, int]:
        """The sum over both."""
        first, second = (mixer.score_flops(keys) for mixer in self.mixers.values())
        return first[0] + second[0], first[1] + second[1]

    def projections(self, tp: int) -> list[Projection]:
        """Projections of both, under the names of the modules; the output projection of attention is the last one."""
        return [
            replace(projection, module=f"{name}.{projection.module}")
            for name, mixer in reversed(list(self.mixers.items()))
            for projection in mixer.projections(tp)
        ]

    def norms(self, tp: int) -> tuple[int, ...]:
        """As attention."""
        return tuple(size for mixer in self.mixers.values() for size in mixer.norms(tp))

    def saved(self) -> tuple[int, int]:
        """The sum over both."""
        first, second = (mixer.saved() for mixer in self.mixers.values())
        return first[0] + second[0], first[1] + second[1]
