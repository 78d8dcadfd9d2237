"""Evaluation with the exponential moving average of the weights."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from megatron_core.config.optimizers import AVERAGE
from megatron_core.data_parallel import DataParallel
from megatron_core.optimizer.shard import Shard
from megatron_core.optimizer.sharded import Optimizer
from megatron_core.training.driver import gather_weights
from megatron_core.training.parts import RunPart
from megatron_core.training.setup import Run


class AveragedWeights(RunPart):
    """Evaluates the run with its averages, too."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def evaluated_weights(self) -> dict[str, Callable[[], AbstractContextManager[None]]]:
        """See ``RunPart.evaluated_weights``."""
        data = self.run.data_parallel
        optimizer = self.run.optimizer
        return {" average": lambda: replaced_weights(data, optimizer, lambda shard: shard.state[AVERAGE.name])}


@contextmanager
@torch.no_grad()
def replaced_weights(data: DataParallel, optimizer: Optimizer, weights_of: Callable[[Shard], Tensor]) -> Iterator[None]:
    """Replace the weights of each shard by ``weights_of(shard)`` inside the context, and restore them to the bit.

    Collective calls of all ranks, which gather the weights as an update does.
    """
    optimizer.before_update()  # a checkpoint may still be copied in the background
    data.finish_param_sync()
    saved = [(shard.bucket.weight_shard, shard.bucket.weight_shard.clone()) for shard in optimizer.shards]
    for shard in optimizer.shards:
        shard.bucket.weight_shard.copy_(weights_of(shard))
    gather_weights([data])
    try:
        yield
    finally:
        data.finish_param_sync()
        for weights, values in saved:
            weights.copy_(values)
        gather_weights([data])
