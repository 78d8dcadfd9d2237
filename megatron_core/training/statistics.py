"""Additional statistics of a step: norms by layer and losses by data source, summed over all ranks."""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megatron_core.datasets.base import sources_of
from megatron_core.optimizer.clip import part_names
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.training.setup import Run


class StepStatistics:
    """This rank's terms of one step's sums: squares and zeros if flags request them, and losses by source of a blend.

    The result of ``own`` is summed over all ranks together with the loss; ``read`` converts the sums to metrics.
    """

    def __init__(self, run: Run) -> None:
        monitor, self._norm = run.config.monitor, run.optimizer.norm
        self._totals = monitor.log_params_norm or monitor.log_num_zeros_in_grad
        self._layers = run.config.model.num_layers if monitor.log_norms_by_layer else None
        self._sources, self._owns_loss = sources_of(run.splits.train), run.split.owns_loss
        self._losses = torch.zeros(2, len(self._sources), dtype=torch.float64, device=run.world.device)

    def add_losses(self, losses: Tensor, batch: MicroBatch) -> None:
        """Add a micro-batch's token losses ``[b, n]``; masked losses are 0."""
        if batch.source is not None and self._owns_loss:
            for total, each in zip(self._losses, (losses.detach(), batch.loss_mask), strict=True):
                total.index_add_(0, batch.source, each.sum(1, dtype=torch.float64))

    def own(self) -> Tensor:
        """This rank's terms, float64 ``[n]``; call it after gradient reduction and before clipping."""
        parts = [self._norm.statistics()] if self._totals else []
        if self._layers is not None:
            parts.append(self._norm.squares_by_part(self._layers).flatten())
        return torch.cat([*parts, self._losses.flatten()])

    def read(self, sums: Sequence[float], loss_scale: float) -> dict[str, float]:
        """Norms of gradients and weights by layer, and losses per token by source, by the name of the metric."""
        return dict(self._read(list(sums), loss_scale))

    def _read(self, sums: list[float], loss_scale: float) -> Iterator[tuple[str, float]]:
        del sums[: 2 * self._totals]
        if self._layers is not None:
            names = part_names(self._layers)
            for metric, scale in (("grad-norm by layer", loss_scale), ("params-norm by layer", 1.0)):
                for name in names:
                    yield f"{metric}/{name}", math.sqrt(sums.pop(0)) / scale
        totals: dict[str, list[float]] = {}
        for at, name in enumerate(self._sources):  # a file may occur twice in a blend
            total = totals.setdefault(name, [0.0, 0.0])
            total[0], total[1] = total[0] + sums[at], total[1] + sums[at + len(self._sources)]
        for name, (loss, tokens) in totals.items():
            if tokens:
                yield f"lm loss by source/{name}", loss / tokens
