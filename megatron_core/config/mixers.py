"""The kind of each layer: attention, a recurrence, both, or neither."""

from megatron_core.config.attention import AttentionKind, Projection, attention_of, kind_named
from megatron_core.config.model import ModelConfig


class NoMixer(AttentionKind):
    """A layer with a feed-forward part alone; base class of layers with other parts than attention."""

    name = "none"

    @property
    def has_rotary(self) -> bool:
        """False."""
        return False

    def cached_elements(self, tp: int) -> int:
        """0."""
        return 0

    def vectors(self, tp: int) -> int:
        """0."""
        return 0

    def score_flops(self, keys: int) -> tuple[int, int]:
        """0."""
        return 0, 0

    def projections(self, tp: int) -> list[Projection]:
        """None."""
        return []

    def norms(self, tp: int) -> tuple[int, ...]:
        """None."""
        return ()

    def saved(self) -> tuple[int, int]:
        """Its input alone."""
        return 0, 0


def recurrence_of(model: ModelConfig, layer_number: int) -> AttentionKind | None:
    """The recurrence of a layer (numbered from 0); None: it has none."""
    name = model.recurrence_of(layer_number)
    return None if name is None else kind_named(name)(model)


def mixer_of(model: ModelConfig, layer_number: int) -> AttentionKind:
    """The attention of a layer (numbered from 0) with the sizes of the layer, its recurrence, or both."""
    recurrence = model.recurrence_of(layer_number)
    has_attention = model.has_attention(layer_number)
    if recurrence is not None:
        return kind_named(f"attention_and_{recurrence}" if has_attention else recurrence)(model)
    if has_attention:
        return attention_of(model.of_layer(layer_number))
    return kind_named("linear")(model) if model.block_of(layer_number).attention.linear else NoMixer(model)
