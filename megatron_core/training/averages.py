"""The exponential moving average of the weights: evaluation with it, and reading it from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from megatron_core.checkpoint import CheckpointReader, TensorBox
from megatron_core.config.optimizers import AVERAGE
from megatron_core.training.driver import gather_weights
from megatron_core.training.setup import Run

PREFIX = f"optimizer.{AVERAGE.name}."


@contextmanager
@torch.no_grad()
def averaged_weights(run: Run) -> Iterator[None]:
    """Replace the weights by their averages inside the context, and restore them to the bit afterwards.

    Collective calls of all ranks, which gather the averages as an update gathers weights.
    """
    kept = [(shard.bucket.weight_shard, shard.bucket.weight_shard.clone()) for shard in run.optimizer.shards]
    for shard in run.optimizer.shards:
        shard.bucket.weight_shard.copy_(shard.state[AVERAGE.name])
    gather_weights([run.data_parallel])
    try:
        yield
    finally:
        for weights, values in kept:
            weights.copy_(values)
        gather_weights([run.data_parallel])


class AveragedReader(CheckpointReader):
    """A checkpoint whose averages are read in place of its weights; tensors without one are read as they are."""

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the averages into the memory of every piece of a weight."""
        super().fill(self._average_of(piece) for piece in pieces)

    def _average_of(self, piece: TensorBox) -> TensorBox:
        name = PREFIX + piece.name.removeprefix("model.")
        return replace(piece, name=name) if name in self.manifest.tensors else piece
