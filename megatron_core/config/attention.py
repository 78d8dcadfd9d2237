"""Kinds of attention: projections, parameters, FLOPs and activations, without torch.

Features add kinds, which ``Feature.attention_kinds`` names. The window of a layer and the kernel are independent of the
kind: they belong to the core attention of queries, keys and values, which all kinds share.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal

from megatron_core.config.model import ModelConfig
from megatron_core.errors import ConfigError
from megatron_core.feature import features, load_hook


@dataclass(frozen=True)
class Projection:
    """A linear layer of attention."""

    inputs: int
    """Input features."""
    outputs: int
    """Output features."""
    split: Literal["inputs", "outputs"] | None = None
    """The side that is split over the tensor-parallel ranks; None: every rank has the whole matrix and, with sequence
    parallelism, multiplies its own part of the sequence."""
    has_bias: bool = False
    """Whether there is a bias per output feature."""
    width: str = ""
    """Formula of the split side over all ranks, for messages."""
    module: str = ""
    """Name of the layer in the attention module."""
    frozen: bool = False
    """Whether the matrix is not trained."""
    pieces: tuple[int, ...] = ()
    """Output features of each matrix that a fused one consists of."""

    @property
    def elements(self) -> int:
        """Elements of the matrix."""
        return self.inputs * self.outputs


class AttentionKind:
    """Sizes of a kind of attention in the layers of ``model``; ``tp`` is the number of tensor-parallel ranks."""

    name: ClassVar[str]
    """The value of --attention-kind."""
    has_own_head_sizes: ClassVar[bool] = False
    """Whether the sizes of heads do not follow from --kv-channels or --hidden-size."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Settings that cannot be used with this kind, with the reason."""
    mixers: Mapping[str, "AttentionKind"] = {}
    """Of a kind that adds the outputs of several others: their kinds, by the names of the modules."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    @property
    def query_head_size(self) -> int:
        """Channels of a query or key head in their product."""
        return self.model.head_size

    @property
    def value_head_size(self) -> int:
        """Channels of a value head, and of a head's attention output."""
        return self.model.head_size

    def key_value_heads(self, tp: int) -> int:
        """Key and value heads of the core attention on a rank."""
        # With fewer groups than ranks, several ranks compute the same group.
        return max(self.model.query_groups // tp, 1)

    def cached_elements(self, tp: int) -> int:
        """Elements per token and layer in the key-value cache of a rank."""
        return self.key_value_heads(tp) * (self.query_head_size + self.value_head_size)

    def state_elements(self, tp: int) -> int:
        """Elements per text and layer in the cache of a rank, whatever the length of the text."""
        return 0

    def vectors(self, tp: int) -> int:
        """Elements on a rank of parameters that are neither projections nor ``norms``."""
        return self.model.num_attention_heads // tp if self.model.softmax_type == "learnable" else 0

    def frozen_vectors(self) -> int:
        """Further elements as ``vectors`` that are not trained."""
        return 0

    def score_flops(self, keys: int) -> tuple[int, int]:
        """Forward FLOPs per token of scores, and of weighted values, for ``keys`` keys of a query."""
        heads = self.model.num_attention_heads
        return 2 * keys * heads * self.query_head_size, 2 * keys * heads * self.value_head_size

    @property
    def has_rotary(self) -> bool:
        """Whether heads have rotary positions."""
        return self.model.position_embedding_type == "rope"

    @property
    def rotary_head(self) -> tuple[int, str]:
        """Channels of a head of which --rotary-percent are rotated, and the settings that determine them."""
        return self.model.head_size, "kv_channels or hidden_size"

    @property
    def rotary_channels(self) -> int:
        """Rotated channels of a head; 0 without rotary positions."""
        return int(self.rotary_head[0] * self.model.rotary_percent) if self.has_rotary else 0

    def projections(self, tp: int) -> list[Projection]:
        """The linear layers, with their sizes on a rank; the first split one receives the queries' input, the last one
        is the output projection."""
        raise NotImplementedError

    def norms(self, tp: int) -> tuple[int, ...]:
        """Channels of the norms of queries, keys or latents on a rank."""
        raise NotImplementedError

    def saved(self) -> tuple[int, int]:
        """Elements per token that the layer saves for backward, in addition to its input and the attention weights.

        (Elements on every tensor-parallel rank, unless divided by sequence parallelism; elements of all heads together,
        which the ranks divide).
        """
        raise NotImplementedError

    def core_elements(self) -> int:
        """Elements per token of queries, keys, values and attention outputs over all ranks."""
        model = self.model
        queries_and_outputs = model.num_attention_heads * (self.query_head_size + self.value_head_size)
        return queries_and_outputs + self.key_value_heads(1) * (self.query_head_size + self.value_head_size)

    def output_projection(self, tp: int) -> Projection:
        """The projection of all heads to the hidden state."""
        model, heads = self.model, self.model.num_attention_heads // tp
        width = "heads x v_head_dim" if self.has_own_head_sizes else "heads x channels"
        inputs, has_bias = heads * self.value_head_size, model.has_attention_output_bias
        return Projection(inputs, model.hidden_size, "inputs", has_bias, width, "linear_proj")


class GroupedQuery(AttentionKind):
    """Queries, keys and values from one projection (Ainslie et al. 2023); multi-head and multi-query attention, too."""

    name = "grouped_query"

    @property
    def query_head_size(self) -> int:
        """Channels of a query or key head in their product, with those of linear biases."""
        return self.model.head_size + self.model.bias_channels

    def score_flops(self, keys: int) -> tuple[int, int]:
        """As ``AttentionKind``, without the products for linear biases: only this implementation needs them."""
        scores, values = super().score_flops(keys)
        return scores - 2 * keys * self.model.num_attention_heads * self.model.bias_channels, values

    def projections(self, tp: int) -> list[Projection]:
        """One projection to queries, gates, keys and values; each rank has at least one group."""
        model = self.model
        queries = model.num_attention_heads // tp * (1 + model.attention_output_gate)
        columns = (queries + 2 * self.key_value_heads(tp)) * model.head_size
        width = f"({'2 heads' if model.attention_output_gate else 'heads'} + 2 groups) x channels"
        groups = self.key_value_heads(tp) * model.head_size
        pieces = columns - 2 * groups, groups, groups
        qkv = Projection(model.hidden_size, columns, "outputs", model.has_qkv_bias, width, "linear_qkv", pieces=pieces)
        return [qkv, self.output_projection(tp)]

    def norms(self, tp: int) -> tuple[int, ...]:
        """Norms of each head's queries and keys, or of all heads together."""
        model, channels = self.model, self.model.head_size
        if not model.qk_layernorm:
            return ()
        if model.qk_layernorm_weight_per_head:
            return ()  # they have no biases: ``vectors``
        if not model.qk_layernorm_over_heads:
            return channels, channels
        return model.num_attention_heads // tp * channels, self.key_value_heads(tp) * channels

    def vectors(self, tp: int) -> int:
        """Sinks, and weights of norms that differ between heads."""
        heads = self.model.num_attention_heads // tp + self.key_value_heads(tp)
        return super().vectors(tp) + heads * self.model.head_size * self.model.qk_layernorm_weight_per_head

    def saved(self) -> tuple[int, int]:
        """Inputs and outputs of the core attention; inputs of norms; gates and their product with the outputs."""
        model = self.model
        outputs = model.num_attention_heads * self.value_head_size
        normed = (
            (model.num_attention_heads + model.query_groups)
            * model.head_size
            * (model.qk_layernorm or model.qk_l2_norm)
        )
        return 0, self.core_elements() + normed + 2 * outputs * model.attention_output_gate


ATTENTION_KINDS: dict[str, type[AttentionKind]] = {GroupedQuery.name: GroupedQuery}
"""The kinds of attention of the core and of programs by name: the values of --attention-kind."""


def add_attention(row: type[AttentionKind]) -> None:
    """Add a row to the table. Errors: ``ConfigError`` if the name is taken."""
    if row.name in ATTENTION_KINDS:
        raise ConfigError(f"attention_kind {row.name!r} is already registered; choose another name")
    ATTENTION_KINDS[row.name] = row


def attention_of(model: ModelConfig) -> AttentionKind:
    """The attention of the layers of ``model``; while rules are checked, an unknown kind counts as grouped-query."""
    return kind_named(model.attention_name)(model)


def kinds_of_features() -> dict[str, str]:
    """The hooks of all kinds of attention and recurrence that features add, by name."""
    return {name: hook for feature in features() for name, hook in feature.attention_kinds.items()}


def kind_named(name: str) -> type[AttentionKind]:
    """The class of a kind of attention or recurrence; grouped-query for an unknown name."""
    hook = kinds_of_features().get(name)
    return ATTENTION_KINDS.get(name, GroupedQuery) if hook is None else _loaded(hook)


_loaded = cache(load_hook)


QUERY_BLOCK = 256
"""Queries whose attention weights are in memory together if dropout or bounded scores exclude the fused path."""
