"""The global gradient norm, which counts every element of the model exactly once in any layout."""

import re

import torch
from torch import Tensor

from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.ops import Backend, squared_norm
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.groups import ParallelGroups

Span = tuple[int, int]
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class GradientNorm:
    """|g| = sqrt(sum of squares) over the buckets of all ranks; a rank may have no buckets.

    Each rank counts the elements that it owns. The owner of replicated parameters and shared key-value rows is the
    lowest rank with a copy, of a tied weight the first stage, of a shard its data-parallel rank, and of an unsharded
    bucket the first data-parallel rank.
    """

    def __init__(self, data_parallel: DataParallel, groups: ParallelGroups, backend: Backend = "auto") -> None:
        buckets = data_parallel.buckets
        self.owned = [(bucket, bucket.owned_ranges()) for bucket in buckets]
        self.copies = [(bucket, _gaps(ranges, bucket.grad_shard.numel())) for bucket, ranges in self.owned]
        self.everywhere = [(bucket, bucket.owned_ranges(every_copy=True)) for bucket in buckets]
        self.compressor = data_parallel.compressor
        self.device = data_parallel.device
        self.backend = backend
        # All ranks: stages of a pipeline hold other layers, and one factor has to scale all of them.
        self.group = groups.group(WORLD)
        self.arithmetic = data_parallel.settings.arithmetic

    def compute(self) -> Tensor:
        """Return the norm of the reduced gradients, a float64 scalar on the device; inf or nan if any gradient is.

        In local steps, which do not sum gradients, it is the root mean square of the norms of the data-parallel ranks.
        """
        if self.arithmetic.adds_exactly:
            owned = [bucket.grad_shard[start:stop] for bucket, spans in self.owned for start, stop in spans]
            return self.arithmetic.exact_norm(owned, self.group, self.device)
        # Copies owned by other ranks add 0, or nan if a copy is not finite, so that all ranks skip the step.
        total = self._mean_of_ranks() if self._is_local() else self._sum_of_squares(self.owned)
        total = total + 0.0 * self._sum_of_squares(self.copies)
        all_reduce_(total, self.group)
        return total.sqrt()

    def statistics(self) -> Tensor:
        """Return this rank's terms of (sum of squared weights, number of zero gradients), float64 ``[2]``."""
        weights = [bucket.weight_shard[start:stop] for bucket, spans in self.owned for start, stop in spans]
        squares = squared_norm(weights, backend=self.backend).to(self.device)
        grads = [bucket.grad_shard[start:stop] for bucket, spans in self.owned for start, stop in spans]
        zeros = [(grad == 0).sum(dtype=torch.float64).to(self.device) for grad in grads]
        return torch.stack([squares, torch.stack(zeros).sum() if zeros else torch.zeros_like(squares)])

    def squares_by_part(self, num_layers: int) -> Tensor:
        """Return this rank's terms of the sums of squared gradients and weights, for each of ``part_names``.

        float64 ``[2, num_layers + 2]``.
        """
        # One list for each part of the whole model, also of other stages, so that the sums of all ranks have one shape.
        spans: list[list[tuple[Bucket, Span]]] = [[] for _ in part_names(num_layers)]
        for bucket, owned in self.owned:
            for name, _, start, stop, offset in bucket.pieces():
                inside = [(max(first, offset), min(end, offset + stop - start)) for first, end in owned]
                spans[model_part_of(name, num_layers)] += [(bucket, span) for span in inside if span[0] < span[1]]
        grads = [[bucket.grad_shard[start:stop] for bucket, (start, stop) in of_part] for of_part in spans]
        weights = [[bucket.weight_shard[start:stop] for bucket, (start, stop) in of_part] for of_part in spans]
        squares = [squared_norm(of_part, backend=self.backend).to(self.device) for of_part in grads + weights]
        return torch.stack(squares).view(2, -1)

    def _is_local(self) -> bool:
        return self.compressor is not None and self.compressor.is_local()

    def _mean_of_ranks(self) -> Tensor:
        """Return this rank's part of the mean over the data-parallel ranks of the squared norms of their gradients."""
        # Every data-parallel rank counts its copy of the gradients, which differ in local steps.
        means = [self._sum_of_squares([entry]) / entry[0].dp_group.size() for entry in self.everywhere]
        return torch.stack(means).sum() if means else self._sum_of_squares([])

    def _sum_of_squares(self, counted_spans: list[tuple[Bucket, list[Span]]]) -> Tensor:
        counted = [bucket.grad_shard[start:stop] for bucket, spans in counted_spans for start, stop in spans]
        return squared_norm(counted, backend=self.backend).to(self.device)


def part_names(num_layers: int) -> list[str]:
    """Return the names of the model parts whose norms are logged.

    The head consists of the final norm, the output layer and the layers of multi-token prediction.
    """
    return ["embedding", *(f"layer {number}" for number in range(num_layers)), "head"]


def model_part_of(name: str, num_layers: int) -> int:
    """Return the index in ``part_names`` of a parameter, given its global name."""
    layer = _LAYER.match(name)
    if layer is not None:
        return 1 + int(layer[1])
    return 0 if name.startswith("embedding.") else num_layers + 1


def _gaps(spans: list[Span], size: int) -> list[Span]:
    """Return the ranges of [0, size) outside ``spans``, which must be in ascending order."""
    edges = [0, *(edge for span in spans for edge in span), size]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def clip_factor(norm: float, limit: float) -> float:
    """Return the factor that reduces the gradient norm to at most ``limit`` (Pascanu et al. 2013); 0: no clipping."""
    # The epsilon is that of torch and Megatron-LM.
    return min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
