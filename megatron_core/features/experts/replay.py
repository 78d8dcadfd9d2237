"""Record the choices of routers, or replay recorded ones."""

from collections.abc import Mapping

from torch import Tensor

from megatron_core.errors import LayoutError


class RouterReplay:
    """Record the experts chosen by all routers of this rank in a forward pass, or replay recorded ones.

    It serves to train a policy on samples that another engine has generated.
    Only the indices of the experts are stored. The replaying router computes the probabilities itself, so it is trained
    as usual. ``recorded`` is the ``choices`` of another pass; without it, this pass is recorded. A layer recomputed in
    backward gets the same experts.
    """

    def __init__(self, recorded: Mapping[int, Tensor] | None = None) -> None:
        self._recorded = recorded
        self.choices: dict[int, Tensor] = {}
        """Per layer, int64 ``[n, b, k]``: the experts of the tokens routed by this rank, ordered by position."""

    def experts(self, layer_number: int, chosen: Tensor) -> Tensor:
        """Return the experts that the layer must use, ``[n, b, k]``; ``chosen``: the choice of its router."""
        # A wrong shape is another batch or layout: choices would be those of other tokens.
        if self._recorded is not None:
            recorded = self._recorded.get(layer_number)
            if recorded is None or recorded.shape != chosen.shape:
                have = "nothing" if recorded is None else f"choices of the shape {list(recorded.shape)}"
                raise LayoutError(
                    f"router replay: layer {layer_number} chooses {list(chosen.shape)} experts (positions, sequences, "
                    f"experts of a token), and {have} was recorded for it; replay the same tokens in the same layout"
                )
            chosen = recorded
        # Also when replaying, so that a recomputed layer, and a caller who compares, find the choices.
        self.choices[layer_number] = chosen
        return chosen
