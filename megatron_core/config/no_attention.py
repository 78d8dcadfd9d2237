"""The kinds of layers with neither attention nor a recurrence."""

from megatron_core.config.attention import AttentionKind, Projection


class LinearMixer(AttentionKind):
    """One linear layer instead of attention (Bercovich et al. 2024, arXiv 2411.19146)."""

    name = "linear"

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
        """A matrix of which each rank has rows."""
        size = self.model.hidden_size
        return [Projection(size, size // tp, "outputs", self.model.add_bias_linear, "hidden_size")]

    def norms(self, tp: int) -> tuple[int, ...]:
        """None."""
        return ()

    def saved(self) -> tuple[int, int]:
        """Its input alone."""
        return 0, 0


class NoMixer(LinearMixer):
    """A layer with an MLP or experts alone."""

    name = "none"

    def projections(self, tp: int) -> list[Projection]:
        """None."""
        return []
