"""Evaluation with the exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from megatron_core.config.optimizers import AVERAGE
from megatron_core.training.driver import gather_weights
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run


class AveragedWeights(RunPart):
    """Evaluates the run with its averages, too."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def evaluated_weights(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """See ``RunPart.evaluated_weights``."""
        return {" average": lambda: averaged_weights(self.run)}


@contextmanager
@torch.no_grad()
def averaged_weights(run: Run) -> Iterator[None]:
    """Replace the weights by their averages inside the context, and restore them to the bit afterwards.

    Collective calls of all ranks, which gather the averages as an update gathers weights.
    """
    saved = [(shard.bucket.weight_shard, shard.bucket.weight_shard.clone()) for shard in run.optimizer.shards]
    for shard in run.optimizer.shards:
        shard.bucket.weight_shard.copy_(shard.state[AVERAGE.name])
    gather_weights([run.data_parallel])
    try:
        yield
    finally:
        for weights, values in saved:
            weights.copy_(values)
        gather_weights([run.data_parallel])
