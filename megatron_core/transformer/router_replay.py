"""Experts that were chosen before, chosen again: for a policy that is trained on what another engine has generated."""

from collections.abc import Mapping

from torch import Tensor

from megatron_core.errors import LayoutError


class RouterReplay:
    """Records the choices of all routers of this rank in a forward pass, or repeats recorded ones.

    Only the numbers of the experts are kept: probabilities are those of the router that repeats them, so that it is
    trained as always. ``recorded`` is another pass's ``choices``; without it the pass is recorded. A layer that is
    computed again in backward finds the same.
    """

    def __init__(self, recorded: Mapping[int, Tensor] | None = None) -> None:
        self._recorded = recorded
        self.choices: dict[int, Tensor] = {}
        """By layer ``[n, b, k]`` int64: the experts of the tokens that this rank routes, position by position."""

    def experts(self, layer_number: int, chosen: Tensor) -> Tensor:
        """What the layer is to use, given what its router has ``chosen``, ``[n, b, k]``."""
        if self._recorded is not None:
            recorded = self._recorded.get(layer_number)
            if recorded is None or recorded.shape != chosen.shape:
                have = "nothing" if recorded is None else f"choices of the shape {list(recorded.shape)}"
                raise LayoutError(
                    f"router replay: layer {layer_number} chooses {list(chosen.shape)} experts (positions, sequences, "
                    f"experts of a token), and {have} was recorded for it; replay the same tokens in the same layout"
                )
            chosen = recorded
        self.choices[layer_number] = chosen
        return chosen
