"""The exponential moving average of the weights in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from megatron_core.checkpoint import CheckpointReader, TensorBox
from megatron_core.config.optimizers import AVERAGE

PREFIX = f"optimizer.{AVERAGE.name}."


class AveragedReader(CheckpointReader):
    """A checkpoint whose averages are read in place of its weights; tensors without one are read as they are."""

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the averages into the memory of every piece of a weight."""
        super().fill(self._average_of(piece) for piece in pieces)

    def _average_of(self, piece: TensorBox) -> TensorBox:
        name = PREFIX + piece.name.removeprefix("model.")
        return replace(piece, name=name) if name in self.manifest.tensors else piece
