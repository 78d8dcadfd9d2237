"""FP8 state of all layers of a rank across steps: amax histories, and counts of clamped and zeroed elements.

The amax of a matrix in a step is the maximum over its micro-batches and over all ranks that compute with parts or
copies of the layer, so that histories are the same in every layout.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_core.config.fp8 import FP8Config
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel.fp8 import ROLES, FP8Products


@dataclass(frozen=True)
class Loss:
    """Shares of the nonzero elements of a layer's matrices that FP8 changed most."""

    layer: str
    role: str
    saturated: float
    """Clamped to the largest number of the format."""
    underflown: float
    """Rounded to 0."""


class AmaxHistories:
    """Histories of all layers in ``modules``, by module name; ``group`` are the ranks with the same stages.

    Every rank calls ``update`` after each step.
    """

    def __init__(self, modules: Iterable[nn.Module], settings: FP8Config, group: Group, device: torch.device) -> None:
        self.layers: dict[str, FP8Products] = {
            name: module.fp8
            for root in modules
            for name, module in root.named_modules()
            if isinstance(getattr(module, "fp8", None), FP8Products)
        }
        self.settings, self.group, self.device = settings, group, device
        self.is_delayed = settings.fp8_format is not None and settings.fp8_recipe == "delayed"
        for layer in self.layers.values():
            layer.recorded = torch.zeros(len(ROLES), device=device)

    def update(self) -> None:
        """Add the step's amaxes to each history. If the amax is 0 (an expert without tokens) or not finite, repeat the
        last entry."""
        if not self.is_delayed or not self.layers:
            return
        latest = torch.stack([layer.recorded for layer in self.layers.values()])
        all_reduce_(latest, self.group, maximum=True)
        for own, layer in zip(latest, self.layers.values(), strict=True):
            if layer.history is None:
                layer.history = own.new_zeros(self.settings.fp8_amax_history_len, len(ROLES))
            own = torch.where(own.isfinite() & (own > 0), own, layer.history[0])
            layer.history = torch.cat([own[None], layer.history[:-1]])
            layer.recorded.zero_()

    def histories(self) -> Mapping[str, Tensor]:
        """The histories ``[steps, 3]`` by layer; empty before the first step."""
        return {name: layer.history for name, layer in self.layers.items() if layer.history is not None}

    def allocate(self) -> Mapping[str, Tensor]:
        """Allocate histories by layer, to be loaded from a checkpoint; its weights were not gathered in FP8."""
        for layer in self.layers.values():
            layer.recorded.zero_()
            layer.weight_is_narrow = False
            layer.history = torch.zeros(self.settings.fp8_amax_history_len, len(ROLES), device=self.device)
        return self.histories()

    def forget(self) -> None:
        """Clear the histories."""
        for layer in self.layers.values():
            layer.history = None

    def count(self, *, wanted: bool) -> None:
        """Start or stop counting clamped and zeroed elements."""
        for layer in self.layers.values():
            layer.counts = torch.zeros(len(ROLES), 3, dtype=torch.float64, device=self.device) if wanted else None

    def losses(self) -> list[Loss]:
        """The shares since counting started, over all ranks of the group, in the order of layers."""
        counted = {name: layer.counts for name, layer in self.layers.items() if layer.counts is not None}
        if not counted:
            return []
        totals = torch.stack(list(counted.values()))
        all_reduce_(totals, self.group)
        return [
            Loss(name, role, clamped / max(present, 1.0), zero / max(present, 1.0))
            for name, rows in zip(counted, totals.tolist(), strict=True)
            for role, (clamped, zero, present) in zip(ROLES, rows, strict=True)
        ]
