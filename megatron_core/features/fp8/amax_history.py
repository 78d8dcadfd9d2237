"""FP8 state of all layers of a rank across steps: amax histories, and counts of clamped and zeroed elements.

The amax of a matrix in a step is the maximum over its micro-batches and over all ranks that compute with parts or
copies of the layer, so that histories are the same in every layout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.checkpoint import Box, TensorBox
from megatron_core.features.fp8.arithmetic import fp8_of
from megatron_core.features.fp8.products import ROLES, FP8Products
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group


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
            name: products
            for root in modules
            for name, module in root.named_modules()
            if (products := fp8_of(module)) is not None
        }
        self.settings = settings
        self.group = group
        self.device = device
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
        for layer_latest, layer in zip(latest, self.layers.values(), strict=True):
            if layer.history is None:
                layer.history = layer_latest.new_zeros(self.settings.fp8_amax_history_len, len(ROLES))
            layer_latest = torch.where(layer_latest.isfinite() & (layer_latest > 0), layer_latest, layer.history[0])
            layer.history = torch.cat([layer_latest[None], layer.history[:-1]])
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

    def pieces(self) -> Iterator[TensorBox]:
        """The histories as pieces of a checkpoint; every rank with the layer has the complete history."""
        return self._pieces(self.histories())

    def pieces_to_load(self, reader: Any) -> list[TensorBox]:
        """Histories to fill from ``reader``; if they are missing or of another length, reset them and print a note."""
        if not self.is_delayed:
            return []
        pieces = list(self._pieces(self.allocate()))
        length = reader.state["config"].get("fp8_amax_history_len")
        if length == self.settings.fp8_amax_history_len and all(reader.has(piece.name) for piece in pieces):
            return pieces
        self.forget()
        if self.group.rank() == 0:
            print("note: the checkpoint has no amax histories of this length; FP8 starts with the scales of tensors")
        return []

    def _pieces(self, histories: Mapping[str, Tensor]) -> Iterator[TensorBox]:
        for name, history in histories.items():
            shape = tuple(history.shape)
            yield TensorBox(f"fp8.amax_history.{name}", shape, Box((0, 0), shape), history, self.group.rank() == 0)

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


def update_of(histories: AmaxHistories | None) -> Callable[[], None]:
    """The function that adds a step to ``histories``."""
    return (lambda: None) if histories is None else histories.update


def pieces_to_load_of(histories: AmaxHistories | None) -> Callable[[Any], Iterable[TensorBox]]:
    """The function from a reader to the pieces that ``histories`` load from it."""
    return (lambda reader: ()) if histories is None else histories.pieces_to_load
