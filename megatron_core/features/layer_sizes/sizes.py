"""The sizes of a linear layer in place of attention or of an MLP (Bercovich et al. 2024, arXiv 2411.19146)."""

from collections.abc import Iterator

from megatron_core.config.attention import Projection
from megatron_core.config.linear_layers import FeedForward, LinearLayer
from megatron_core.config.mixers import NoMixer


class LinearMixer(NoMixer):
    """One linear layer instead of attention."""

    name = "linear"

    def projections(self, tp: int) -> list[Projection]:
        """A matrix of which each rank has rows."""
        size = self.model.hidden_size
        return [Projection(size, size // tp, "outputs", self.model.add_bias_linear, "hidden_size")]


class LinearFeedForward(FeedForward):
    """One linear layer instead of the MLP."""

    def linear_layers(self, tp: int = 1, ep: int = 1, etp: int = 1) -> Iterator[LinearLayer]:
        """A matrix of which each rank has rows."""
        yield LinearLayer("mlp", self.model.hidden_size, (self.model.hidden_size // tp,))
