"""The sizes of the parts of a transformer layer."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class LayerPart:
    """The attention or the MLP of a layer."""

    no_op: bool = False
    """Whether the layer does not have it."""
    linear: bool = False
    """Whether a matrix ``[h, h]`` replaces it."""
    size: int | None = None
    """Number of key-value groups, or width of the MLP; None: that of the model."""

    def sized(self, size: int) -> LayerPart:
        """The part with ``size``, if it has a size and none of its own."""
        return self if self.no_op or self.linear or self.size is not None else replace(self, size=size)


@dataclass(frozen=True)
class LayerBlock:
    """The parts of a layer."""

    attention: LayerPart = LayerPart()
    """Its attention; the size is the number of key-value groups."""
    mlp: LayerPart = LayerPart()
    """Its MLP; the size is the width."""

    @property
    def is_empty(self) -> bool:
        """Whether the layer returns its input."""
        return self.attention.no_op and self.mlp.no_op

    @property
    def has_sizes_of_model(self) -> bool:
        """Whether no part has a size of its own."""
        return self.attention.size is None and self.mlp.size is None

    def sized(self, groups: int, width: int) -> LayerBlock:
        """The layer with the sizes of the model where it has none of its own."""
        return LayerBlock(self.attention.sized(groups), self.mlp.sized(width))


WHOLE_BLOCK = LayerBlock()
"""A layer with attention and an MLP of the sizes of the model."""
