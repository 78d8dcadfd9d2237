"""The kinds of recurrences, and the kind of each layer: attention or a recurrence.

To add a recurrence, add a subclass of ``AttentionKind`` and its row here, its name to ``config.recurrent``, and its
layer to ``RECURRENT_LAYERS`` in ``megatron_core/transformer/layer_spec.py``.
"""

from __future__ import annotations

from megatron_core.config.attention import AttentionKind, Projection, attention_of
from megatron_core.config.model import ModelConfig


class GatedDeltaNet(AttentionKind):
    """A recurrence instead of attention: a convolution of queries, keys and values, and the gated delta rule (Yang et
    al. 2025, arXiv 2412.06464). Its heads have their own numbers and sizes."""

    name = "gated_delta_net"
    has_own_head_sizes = True

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
    def convolved(self) -> int:
        """Channels of the convolution over all ranks."""
        return sum(self.pieces[:3])

    @property
    def has_rotary(self) -> bool:
        """False: the order of tokens is that of the recurrence."""
        return False

    def cached_elements(self, tp: int) -> int:
        """0: the cache does not grow with the text."""
        return 0

    def state_elements(self, tp: int) -> int:
        """The states of a rank's heads, and the tokens before the next one that its convolution reads."""
        model = self.model
        states = model.linear_num_value_heads // tp * self.query_head_size * self.value_head_size
        return states + self.convolved // tp * (model.linear_conv_kernel_dim - 1)

    def vectors(self, tp: int) -> int:
        """Weights of the convolution, of decays (two per head) and of the norm of a head's output."""
        model = self.model
        convolution = self.convolved // tp * model.linear_conv_kernel_dim
        return convolution + (model.linear_num_value_heads + self.pieces[5]) // tp + self.value_head_size

    def score_flops(self, keys: int) -> tuple[int, int]:
        """The recurrence, as Megatron-LM counts it: convolution; four products of ``[dk, dv]`` and token per head."""
        model = self.model
        state = self.query_head_size * self.value_head_size * model.linear_num_value_heads
        return 2 * self.convolved * model.linear_conv_kernel_dim, 8 * state

    def projections(self, tp: int) -> list[Projection]:
        """One projection to all ``pieces``, and the output projection."""
        model = self.model
        width = "2 (key heads x channels + value heads x channels + value heads)"
        columns, values = sum(self.pieces) // tp, self.pieces[2] // tp
        return [
            Projection(model.hidden_size, columns, "outputs", False, width, "in_proj"),
            Projection(values, model.hidden_size, "inputs", False, "value heads x channels", "out_proj"),
        ]

    def norms(self, tp: int) -> tuple[int, ...]:
        """None: the norm of outputs is always an RMSNorm, see ``vectors``."""
        return ()

    def saved(self) -> tuple[int, int]:
        """All pieces; the convolution's input and output before and after silu; outputs of the heads before and after
        the norm, silu of the gates and their product. The recurrence is computed again."""
        if self.model.recomputes("core_attn"):
            return 0, sum(self.pieces) + self.pieces[2]
        return 0, sum(self.pieces) + 3 * self.convolved + 4 * self.pieces[2]


class KimiDelta(GatedDeltaNet):
    """The gated delta net with a decay for each key channel of a head, and with gates and decays that are projections
    of few channels (Kimi Team 2025, arXiv 2510.26692, section 3)."""

    name = "kimi_delta_attention"

    @property
    def rank(self) -> int:
        """Channels between the two projections to gates, and between those to decays."""
        return self.value_head_size

    @property
    def pieces(self) -> tuple[int, int, int, int, int, int]:
        """As the gated delta net, with as many decays as keys."""
        *others, _ = super().pieces
        keys, _, values, gates, rates = others
        return keys, keys, values, gates, rates, keys

    def projections(self, tp: int) -> list[Projection]:
        """To queries, keys, values and rates; to decays and to gates, each in two steps; and the output projection."""
        hidden, (keys, _, values, gates, rates, decays) = self.model.hidden_size, self.pieces
        up, width = "value heads x channels", "2 key heads x channels + value heads x channels + value heads"
        return [
            Projection(hidden, (2 * keys + values + rates) // tp, "outputs", False, width, "in_proj"),
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


RECURRENT_KINDS: dict[str, type[GatedDeltaNet]] = {kind.name: kind for kind in (GatedDeltaNet, KimiDelta)}
"""All kinds of recurrences by name, the values of --experimental-attention-variant."""


def mixer_of(model: ModelConfig, layer_number: int) -> AttentionKind:
    """The attention of a layer (numbered from 0), or its recurrence."""
    if not model.is_recurrent(layer_number):
        return attention_of(model)
    assert model.experimental_attention_variant is not None, "the kind of recurrent layers"
    return RECURRENT_KINDS[model.experimental_attention_variant](model)
