"""The FP8 of all layers of a rank from step to step: histories of amaxes, and what was lost.

A step's amax of a matrix is the largest over its micro-batches and over all ranks that compute with parts or copies of
the layer, so that histories are the same in every layout.
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
    """What FP8 lost of a layer's matrices of a kind: shares of their elements that are not 0."""

    layer: str
    role: str
    saturated: float
    """Clamped to the largest number of the format."""
    underflown: float
    """Became 0."""


class AmaxHistories:
    """Of all layers in ``modules``, by the names of these; ``group`` are the ranks with the same stages.

    After each step every rank calls ``update``.
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
        """Make what the step recorded the latest entry of each history; where that was nothing, zeros alone (an expert
        without tokens), or not finite, the last one stays."""
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
        """The histories ``[steps, 3]`` by layer; none before the first step."""
        return {name: layer.history for name, layer in self.layers.items() if layer.history is not None}

    def allocate(self) -> Mapping[str, Tensor]:
        """Empty histories by layer, to be filled from a checkpoint, whose weights no gather has rounded or recorded."""
        for layer in self.layers.values():
            layer.recorded.zero_()
            layer.weight_is_narrow = False
            layer.history = torch.zeros(self.settings.fp8_amax_history_len, len(ROLES), device=self.device)
        return self.histories()

    def forget(self) -> None:
        """Begin anew."""
        for layer in self.layers.values():
            layer.history = None

    def count(self, *, wanted: bool) -> None:
        """Begin to count what is lost, or stop."""
        for layer in self.layers.values():
            layer.counts = torch.zeros(len(ROLES), 3, dtype=torch.float64, device=self.device) if wanted else None

    def losses(self) -> list[Loss]:
        """What was lost since counting began, over all ranks of the group, in the order of layers."""
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
