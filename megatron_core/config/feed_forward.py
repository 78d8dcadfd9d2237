"""The feed-forward part of a layer: an MLP, or a part in its place, which a feature may provide; without torch."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, ClassVar, NamedTuple

from megatron_core.config.model import ModelConfig
from megatron_core.feature import features, load_hook


class LinearLayer(NamedTuple):
    """A linear layer with its sizes on a rank."""

    path: str
    """Name in the transformer layer, such as ``mlp.linear_fc1``."""
    inputs: int
    pieces: tuple[int, ...]
    """Outputs of each matrix that it consists of; several if it is fused."""
    experts: int = 0
    """Number of experts on a rank, each of which has its own; 0 outside of experts."""
    frozen: bool = False
    """Whether its weight is not trained."""

    @property
    def elements(self) -> int:
        """Elements of its weight, of one expert."""
        return self.inputs * sum(self.pieces)


class FeedForward:
    """Sizes of the feed-forward part of the layers of ``model``; this one is an MLP."""

    recomputed_as: ClassVar[str] = "mlp"
    """The word of --recompute-modules for the whole part."""

    def __init__(self, model: ModelConfig) -> None:
        self.model = model

    def linear_layers(self, tp: int = 1, ep: int = 1, etp: int = 1) -> Iterator[LinearLayer]:
        """The linear layers; ``ep``, ``etp``: numbers of ranks that split experts, and the matrices of each."""
        return self.pair("mlp", self.model.hidden_size, self.model.ffn_size // tp)

    def pair(self, path: str, outer: int, width: int, experts: int = 0) -> Iterator[LinearLayer]:
        """The layers from ``outer`` channels to the activation function, and back, with ``width`` between them."""
        yield LinearLayer(f"{path}.linear_fc1", outer, (width,) * (2 if self.model.gated_linear_unit else 1), experts)
        yield LinearLayer(f"{path}.linear_fc2", width, (outer,), experts)

    def router_matrices(self) -> Iterator[tuple[int, int]]:
        """Outputs and inputs of further matrices, which choose experts or weight them; every rank has them."""
        return iter(())

    def saved_bytes(self, number: int, etp: int) -> float:
        """Bytes per token that all tensor-parallel ranks save for backward; ``number``: bytes of a number."""
        # Before and after the activation function.
        widths = sum(layer.inputs for layer in self.linear_layers() if layer.path.endswith("linear_fc2"))
        return 0 if self.model.recomputes("mlp") else number * widths * (3 if self.model.gated_linear_unit else 2)

    def flops(self) -> dict[str, int]:
        """Forward FLOPs of a token, by term of ``forward_flops_per_token``."""
        return {"mlp": 2 * sum(layer.elements for layer in self.linear_layers())}


class LinearFeedForward(FeedForward):
    """One linear layer instead of the MLP (Bercovich et al. 2024, arXiv 2411.19146)."""

    def linear_layers(self, tp: int = 1, ep: int = 1, etp: int = 1) -> Iterator[LinearLayer]:
        """A matrix of which each rank has rows."""
        yield LinearLayer("mlp", self.model.hidden_size, (self.model.hidden_size // tp,))


class NoFeedForward(FeedForward):
    """A layer with attention or a recurrence alone."""

    def linear_layers(self, tp: int = 1, ep: int = 1, etp: int = 1) -> Iterator[LinearLayer]:
        """None."""
        return iter(())


KINDS: dict[str | None, type[FeedForward]] = {"mlp": FeedForward, "linear": LinearFeedForward, None: NoFeedForward}
"""The kinds of the core, by the names that ``ModelConfig.feed_forward_name`` returns."""


def feed_forward_of(model: ModelConfig, layer_number: int) -> FeedForward:
    """The feed-forward part of a layer (numbered from 0) with the sizes of the layer."""
    name = model.feed_forward_name(layer_number)
    kind = KINDS[name] if name in KINDS else _kind_of_a_feature(name)
    return kind(model.of_layer(layer_number))


@cache
def _kind_of_a_feature(name: Any) -> type[FeedForward]:
    hook = next(feature.feed_forwards[name] for feature in features() if name in feature.feed_forwards)
    feed_forward: type[FeedForward] = load_hook(hook)
    return feed_forward
