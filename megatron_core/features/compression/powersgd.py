"""Compressed gradient sums with error feedback: PowerSGD. ``signs`` has the sums of signs.

All of them keep on each rank the compression error of its last message and add it to the next message, so that no
contribution is lost, only delayed. Each rank compresses its own tensor-parallel part of a matrix, so results depend on
the tensor-parallel size, as with all lossy compression; errors belong to a data-parallel rank.

A sum is a generator: it yields after starting each message, and continues after the message has arrived, so that the
caller can compute in the meantime. Errors do not include the loss scale. A sum only prepares new errors; ``commit``
stores them when the optimizer takes the step, and ``discard`` drops them, so that a skipped step changes nothing. All
ranks take the same decision: a gradient that is not finite on one rank makes the sum not finite on all ranks.
"""

from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.features.compression.stored import StoredCompressor
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group
from megatron_core.parallel.handles import Done, Handle
from megatron_core.parallel.initialization import name_seed


class PowerSGD(StoredCompressor):
    """Vogels et al. 2019, algorithms 1 and 2: for a matrix M only P = M Q and Q = M^T P, of rank r, are summed.

    M_i = g_i + e_i;  P = orthogonal(sum M_i Q);  Q = sum M_i^T P;  sum g is replaced by P Q^T;  e_i = M_i - P Q^T / n.

    Some parameters are summed without compression: vectors; matrices whose factors are larger than half the matrix; and
    matrices with rows that tensor-parallel ranks share (keys and values), because these rows must stay equal.
    """

    def __init__(self, rank: int, warmup: int) -> None:
        super().__init__()
        self.rank = rank
        self.warmup = warmup
        self._state: dict[Bucket, tuple[Tensor, list[Tensor]]] = {}

    def is_active(self) -> bool:
        """Whether the warm-up is over."""
        return self.step >= self.warmup

    def reduce_(self, bucket: Bucket) -> Iterator[Handle]:
        """Replace ``bucket.grads`` by their approximate sum; see ``Compressor.reduce_``."""
        errors, factors = self._pending.get(bucket) or self._state_of(bucket)
        group = bucket.dp_group
        loss_scale = self.loss_scale()
        # Add the errors; sum the left factors.
        bucket.grads.add_(errors, alpha=loss_scale)
        matrices, uncompressed = self._split(bucket)
        lefts, handle = _start_sum([m @ q for m, q in zip(matrices, factors, strict=True)], group)
        bucket.wire_bytes += sum(left.nbytes for left in lefts)
        if lefts:
            yield handle
        # Orthogonalise the left factors; sum the right factors and the uncompressed parameters. QR needs finite
        # numbers; the right factor of a matrix that is not finite is not finite either, so that the step is skipped.
        lefts = [torch.linalg.qr(left.nan_to_num(0.0, 0.0, 0.0)).Q for left in lefts]
        products = [m.mT @ p for m, p in zip(matrices, lefts, strict=True)]
        totals, handle = _start_sum([*products, *uncompressed], group)
        bucket.wire_bytes += sum(total.nbytes for total in totals)
        yield handle
        # Replace the gradients, and prepare the errors and factors for the next step.
        rights = totals[: len(lefts)]
        plain = totals[len(lefts) :]
        fresh = torch.zeros_like(bucket.grads)
        for matrix, error, left, right in zip(matrices, self._split(bucket, fresh)[0], lefts, rights, strict=True):
            error.copy_(matrix)
            torch.mm(left, right.mT, out=matrix)
            error.sub_(matrix, alpha=1.0 / group.size()).div_(loss_scale)
        for piece, total in zip(uncompressed, plain, strict=True):
            piece.copy_(total)
        self._pending[bucket] = fresh, [right / loss_scale for right in rights]

    def commit(self, factor: float, limit: float) -> None:
        """See ``Compressor.commit``."""
        for bucket, (errors, factors) in self._pending.items():
            stored, old = self._state_of(bucket)
            stored.copy_(errors)
            for before, after in zip(old, factors, strict=True):
                before.copy_(after)
        self._pending.clear()

    def state(self, bucket: Bucket) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the errors of this rank and the factors, which are equal on all ranks."""
        errors, factors = self._state_of(bucket)
        yield "error", errors, True
        for number, factor in enumerate(factors):
            yield f"factor{number}", factor, False

    def _state_of(self, bucket: Bucket) -> tuple[Tensor, list[Tensor]]:
        if bucket not in self._state:
            errors = torch.zeros(bucket.grads.shape, dtype=bucket.grads.dtype, device=bucket.grads.device)
            factors = [self._draw(bucket, n, m) for n, m in enumerate(self._split(bucket, errors)[0])]
            self._state[bucket] = errors, factors
        return self._state[bucket]

    def _draw(self, bucket: Bucket, number: int, matrix: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(name_seed(number, bucket.names[0]) % 2**63)
        return torch.randn(matrix.shape[1], self.rank, generator=generator).to(matrix)

    def _split(self, bucket: Bucket, flat: Tensor | None = None) -> tuple[list[Tensor], list[Tensor]]:
        """Return the compressible matrices of the bucket and the other parameters, as views of ``flat`` (default
        ``grads``).
        """
        matrices: list[Tensor] = []
        uncompressed: list[Tensor] = []
        for parameter, offset in zip(bucket.parameters, bucket.offsets, strict=True):
            piece = (bucket.grads if flat is None else flat)[offset : offset + parameter.numel()]
            rows, columns = parameter.shape[0], prod(parameter.shape[1:])
            shrinks = parameter.dim() > 1 and 2 * self.rank * (rows + columns) <= rows * columns
            shrinks = shrinks and not bucket.kind.shared_axes
            (matrices if shrinks else uncompressed).append(piece.view(rows, columns) if shrinks else piece)
        return matrices, uncompressed


def _start_sum(tensors: list[Tensor], group: Group) -> tuple[list[Tensor], Handle]:
    """Start to sum all tensors over the group by one collective; the sums are valid after the handle's ``wait``."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
    handle = all_reduce_(flat, group, async_op=True) if tensors else Done()
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)], handle
