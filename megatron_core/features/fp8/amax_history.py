"""FP8 state of all layers of a rank across steps: amax histories, and counts of clamped and zeroed elements.

The amax of a matrix in a step is the maximum over its micro-batches and over all ranks that compute with parts or
copies of the layer, so that histories are the same in every layout.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.checkpoint import Box, TensorBox
from megatron_core.features.fp8.arithmetic import fp8_of
from megatron_core.features.fp8.native_casts import roll_natively
from megatron_core.features.fp8.products import ROLES, FP8Products
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.ops.backend import select_backend
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
        # One tensor for all layers, so that a step has one reduction and one launch.
        self._recorded = torch.zeros(len(self.layers), len(ROLES), device=device)
        self._history: Tensor | None = None
        for layer, recorded in zip(self.layers.values(), self._recorded, strict=True):
            layer.recorded = recorded

    def begin_step(self, *, keeps_weights: bool) -> None:
        """Drop the quantised weights of an earlier step; ``keeps_weights``: quantise each once until ``update``."""
        for layer in self.layers.values():
            layer.keep_weight(wanted=keeps_weights)

    def update(self) -> None:
        """Add the step's amaxes to each history. If the amax is 0 (an expert without tokens) or not finite, repeat the
        last entry."""
        self.begin_step(keeps_weights=False)
        if not self.is_delayed or not self.layers:
            return
        all_reduce_(self._recorded, self.group, maximum=True)
        if self._history is None:
            self._allocate()
        assert self._history is not None
        scales, inverses = roll(self._recorded, self._history, next(iter(self.layers.values())))
        for layer, scale, inverse in zip(self.layers.values(), scales, inverses, strict=True):
            layer.known_scales = scale, inverse

    def histories(self) -> Mapping[str, Tensor]:
        """The histories ``[steps, 3]`` by layer; empty before the first step."""
        return {name: layer.history for name, layer in self.layers.items() if layer.history is not None}

    def allocate(self) -> Mapping[str, Tensor]:
        """Allocate histories by layer, to be loaded from a checkpoint; its weights were not gathered in FP8."""
        self._recorded.zero_()
        for layer in self.layers.values():
            layer.weight_is_narrow = False
        self._allocate()
        return self.histories()

    def _allocate(self) -> None:
        steps = self.settings.fp8_amax_history_len
        self._history = torch.zeros(len(self.layers), steps, len(ROLES), device=self.device)
        for layer, history in zip(self.layers.values(), self._history, strict=True):
            layer.history = history
            layer.known_scales = None

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
        self._history = None
        for layer in self.layers.values():
            layer.history = layer.known_scales = None
        if self.group.rank() == 0:
            print("note: the checkpoint has no amax histories of this length; FP8 starts with the scales of tensors")
        return []

    def _pieces(self, histories: Mapping[str, Tensor]) -> Iterator[TensorBox]:
        for name, history in histories.items():
            shape = tuple(history.shape)
            yield TensorBox(f"fp8.amax_history.{name}", shape, Box((0, 0), shape), history, self.group.rank() == 0)

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


def roll(latest: Tensor, history: Tensor, layer: FP8Products) -> Sequence[Tensor]:
    """Append ``latest`` ``[L, 3]`` to ``history`` ``[L, steps, 3]`` and set it to 0; return scales and their inverses.

    ``layer``: one of the layers, which have equal settings. The native kernel is one launch.
    """
    settings = layer.settings
    if select_backend("fp8", layer.backend, latest.device.type, latest.dtype) == "native":
        scales = torch.empty(2, *latest.shape, device=latest.device)
        largest = [torch.finfo(layer.dtypes[role]).max for role in ROLES]
        takes_largest = settings.fp8_amax_compute_algo == "max"
        roll_natively(latest, history, scales, largest, takes_largest=takes_largest, divisor=2.0**settings.fp8_margin)
        return scales.unbind()
    amaxes = torch.where(latest.isfinite() & (latest > 0), latest, history[:, 0])
    history.copy_(torch.cat([amaxes[:, None], history[:, :-1]], dim=1))
    latest.zero_()
    return layer.scales_of(history)


def update_of(histories: AmaxHistories | None) -> Callable[[], None]:
    """The function that adds a step to ``histories``."""
    return (lambda: None) if histories is None else histories.update
