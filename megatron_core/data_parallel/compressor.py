"""Base class of lossy sums of gradients, which features implement."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.handles import Handle

Bucket = Any
"""A ``data_parallel.buffer.Bucket``, whose module imports this one."""


class Compressor:
    """Approximate sum of a bucket's gradients over its data-parallel ranks."""

    def __init__(self) -> None:
        self.start_gather: Any = None  # a ``StartGather`` of weights at stage 3, in place of that of their layers
        self.step = 0
        """Number of optimizer steps so far."""
        # A function, because a dynamic scale changes between steps.
        self.loss_scale: Callable[[], float] = lambda: 1.0
        """Returns the factor on the gradients of this step, which is not part of the stored errors."""
        self.update_rule: Callable[[Any, ParallelGroups], Any] = lambda rule, groups: rule
        """Returns the update rule to use instead of an ``optimizer.rule.Algorithm``, for optimizers that are a part of
        the compression."""

    def is_active(self) -> bool:
        """Whether ``reduce_`` replaces the sum of the gradients of the next step."""
        raise NotImplementedError

    def is_local(self) -> bool:
        """Whether the gradients of the next step are not summed: each rank has its own estimate of the sum."""
        return False

    def reduce_(self, bucket: Bucket) -> Iterator[Handle]:
        """Replace ``bucket.grads`` by their sum; yield the handle of each message after starting it.

        The caller waits for the handle before it continues the generator. All ranks of the bucket must start and
        continue their generators in the same order. The sum is not finite on every rank if a gradient of any rank is.
        """
        raise NotImplementedError

    def commit(self, factor: float, limit: float) -> None:
        """Store the errors of this step. The optimizer multiplies the gradients by ``factor``, then with a ``limit``
        above 0 clamps them to ``[-limit, limit]``.
        """
        raise NotImplementedError

    def discard(self) -> None:
        """Drop the errors of this step, which is skipped; the stored errors do not change."""
        raise NotImplementedError

    def pieces(self, data: Any) -> Iterable[Any]:
        """Return this rank's pieces of the state for checkpoints, ``TensorBox`` named ``compression.*``; ``data``: the
        ``DataParallel``."""
        return ()

    def pieces_to_load(self, reader: Any, data: Any) -> Iterable[Any]:
        """Return the pieces that ``reader``, a ``StateReader``, has; called before they are filled, on all ranks."""
        return ()

    def attach(self, shards: Sequence[Any], loss_scale: Callable[[], float]) -> None:
        """Receive the optimizer's ``Shard`` objects, with the state that they allocate, and its loss scale."""
        self.loss_scale = loss_scale
