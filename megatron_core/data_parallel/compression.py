"""Compressed gradient sums with error feedback: PowerSGD, and the momentum of 1-bit Adam.

Both keep on each rank the compression error of its last message and add it to the next message, so that no contribution
is lost, only delayed. Each rank compresses its own tensor-parallel part of a matrix, so results depend on the
tensor-parallel size, as with all lossy compression; errors belong to a data-parallel rank.

A sum is a generator: it yields after starting each message, and continues after the message has arrived, so that the
caller can compute in the meantime. Errors do not include the loss scale. A sum only prepares new errors; ``commit``
stores them when the optimizer takes the step, and ``discard`` drops them, so that a skipped step changes nothing. All
ranks take the same decision: a gradient that is not finite on one rank makes the sum not finite on all ranks.
"""

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.parallel.collectives import Done, Handle, all_gather_flat_, all_reduce_, start_all_to_all_rows
from megatron_core.parallel.groups import Group
from megatron_core.parallel.initialization import name_seed


class PowerSGD:
    """Vogels et al. 2019, algorithms 1 and 2: for a matrix M only P = M Q and Q = M^T P, of rank r, are summed.

    M_i = g_i + e_i;  P = orthogonal(sum M_i Q);  Q = sum M_i^T P;  sum g is replaced by P Q^T;  e_i = M_i - P Q^T / n.

    Some parameters are summed without compression: vectors; matrices whose factors are larger than half the matrix; and
    matrices with rows that tensor-parallel ranks share (keys and values), because these rows must stay equal.
    """

    def __init__(self, rank: int, warmup: int) -> None:
        self.rank, self.warmup, self.step = rank, warmup, 0
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self._state: dict[Bucket, tuple[Tensor, list[Tensor]]] = {}
        self._pending: dict[Bucket, tuple[Tensor, list[Tensor]]] = {}

    def is_active(self) -> bool:
        """Whether the warm-up is over."""
        return self.step >= self.warmup

    def reduce_(self, bucket: Bucket) -> Iterator[Handle]:
        """Replace ``bucket.grads`` by their approximate sum; see ``Compressor.reduce_``."""
        errors, factors = self._pending.get(bucket) or self._state_of(bucket)
        group, loss_scale = bucket.dp_group, self.loss_scale()
        # Add the errors; sum the left factors.
        bucket.grads.add_(errors, alpha=loss_scale)
        matrices, rest = self._split(bucket)
        lefts, handle = _start_sum([m @ q for m, q in zip(matrices, factors, strict=True)], group)
        bucket.wire_bytes += sum(left.nbytes for left in lefts)
        if lefts:
            yield handle
        # Orthogonalise the left factors; sum the right factors and the uncompressed parameters. QR needs finite
        # numbers; the right factor of a matrix that is not finite is not finite either, so that the step is skipped.
        lefts = [torch.linalg.qr(left.nan_to_num(0.0, 0.0, 0.0)).Q for left in lefts]
        products = [m.mT @ p for m, p in zip(matrices, lefts, strict=True)]
        totals, handle = _start_sum([*products, *rest], group)
        bucket.wire_bytes += sum(total.nbytes for total in totals)
        yield handle
        # Replace the gradients, and prepare the errors and factors for the next step.
        rights, plain = totals[: len(lefts)], totals[len(lefts) :]
        fresh = torch.zeros_like(bucket.grads)
        for matrix, error, left, right in zip(matrices, self._split(bucket, fresh)[0], lefts, rights, strict=True):
            error.copy_(matrix)
            torch.mm(left, right.mT, out=matrix)
            error.sub_(matrix, alpha=1.0 / group.size()).div_(loss_scale)
        for piece, total in zip(rest, plain, strict=True):
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

    def discard(self) -> None:
        """See ``Compressor.discard``."""
        self._pending.clear()

    def forget(self) -> None:
        """See ``Compressor.forget``."""
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
        rest: list[Tensor] = []
        for parameter, at in zip(bucket.parameters, bucket.offsets, strict=True):
            piece = (bucket.grads if flat is None else flat)[at : at + parameter.numel()]
            rows, columns = parameter.shape[0], prod(parameter.shape[1:])
            shrinks = parameter.dim() > 1 and 2 * self.rank * (rows + columns) <= rows * columns
            shrinks = shrinks and not bucket.kind.shared_axes
            (matrices if shrinks else rest).append(piece.view(rows, columns) if shrinks else piece)
        return matrices, rest


class OneBitAdam:
    """Tang et al. 2021, algorithm 1: after a warm-up Adam's variance is frozen and the signs of momenta are summed.

    c_i = b1 m / n + (1 - b1) g_i + e_i is sent as sign(c_i) |c_i| / sqrt(N). Each rank sums its share of all ranks'
    messages, compresses the sum with a second error, and gathers the other ranks' shares: m'. Gradients become
    (m' - b1 m) / (1 - b1), from which Adam computes the momentum m'.

    Every rank needs the whole momentum. If the optimizer's state is sharded (ZeRO), the momenta and the signs of the
    variances are gathered once, and each rank repeats the update of the momentum.
    """

    def __init__(self, beta1: float, warmup: int) -> None:
        self.beta1, self.warmup, self.step = beta1, warmup, 0
        self.loss_scale: Callable[[], float] = lambda: 1.0
        self.moments: dict[Bucket, dict[str, Tensor]] = {}
        """Adam's state by bucket, set by the optimizer."""
        self._errors: dict[Bucket, tuple[Tensor, Tensor]] = {}
        self._pending: dict[Bucket, tuple[Tensor, Tensor]] = {}
        self._sums: dict[Bucket, Tensor] = {}
        """Whole decompressed gradients of this step, for sharded buckets."""
        self._gathered: dict[Bucket, tuple[Tensor, Tensor]] = {}

    def is_active(self) -> bool:
        """Whether the warm-up is over."""
        return self.step >= self.warmup

    def reduce_(self, bucket: Bucket) -> Iterator[Handle]:
        """Replace ``bucket.grads`` by the gradient that leads to the summed momentum; see ``Compressor.reduce_``."""
        is_first = bucket not in self._pending
        own, share = self._errors_of(bucket) if is_first else self._pending[bucket]
        group, size, loss_scale = bucket.dp_group, bucket.dp_group.size(), self.loss_scale()
        momentum, trained = self._moments_of(bucket)
        # Compress this rank's message and send each rank its share.
        message = bucket.grads * ((1.0 - self.beta1) / loss_scale) + own
        if is_first:
            message.add_(momentum, alpha=self.beta1 / size)
        bits, mean, handle = _start_compression(message, bucket.model_group)
        if bucket.model_group.size() > 1:
            yield handle
        scale = mean.sqrt()
        # Elements of variance 0, such as padding, have no sign and no error.
        own = (message - _decompressed(bits, scale)).mul_(trained)
        rows = torch.cat([bits.view(size, -1), _as_bytes(scale).expand(size, -1)], dim=1)
        received, handle = start_all_to_all_rows(rows, [1] * size, [1] * size, group)
        yield handle
        # Sum this rank's share, compress it, and gather the shares of all ranks.
        total = share.clone()
        for row in received:
            total += _decompressed(*_parts_of(row, scale.dtype))
        bits, mean, handle = _start_compression(total, bucket.model_group)
        if bucket.model_group.size() > 1:
            yield handle
        scale = mean.sqrt()
        share = (total - _decompressed(bits, scale)).mul_(trained.view(size, -1)[group.rank()])
        own_row = torch.cat([bits, _as_bytes(scale)])
        gathered = own_row.new_empty(size * own_row.numel())
        handle = all_gather_flat_(gathered, own_row, group, async_op=True)
        bucket.wire_bytes += rows.nbytes + own_row.nbytes
        yield handle
        # Replace the gradients, and keep the errors until the step is taken.
        summed = torch.cat([_decompressed(*_parts_of(row, scale.dtype)) for row in gathered.view(size, -1)])
        summed.mul_(trained)
        if is_first:
            summed.sub_(momentum, alpha=self.beta1)
        torch.mul(summed, loss_scale / (1.0 - self.beta1), out=bucket.grads)
        self._pending[bucket] = own, share
        if bucket.is_sharded:
            self._sums[bucket] = bucket.grads.clone() if is_first else self._sums[bucket].add_(bucket.grads)

    def commit(self, factor: float, limit: float) -> None:
        """See ``Compressor.commit``; also update the gathered momenta, in the same way as Adam updates its shard."""
        for bucket, pending in self._pending.items():
            for stored, fresh in zip(self._errors_of(bucket), pending, strict=True):
                stored.copy_(fresh)
        for bucket, grads in self._sums.items():
            grads.mul_(factor)
            if limit > 0.0:
                grads.clamp_(-limit, limit)
            self._gathered[bucket][0].lerp_(grads, 1.0 - self.beta1)
        self.discard()

    def discard(self) -> None:
        """See ``Compressor.discard``."""
        self._pending.clear()
        self._sums.clear()

    def forget(self) -> None:
        """See ``Compressor.forget``."""
        self.discard()
        self._gathered.clear()

    def state(self, bucket: Bucket) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the errors of this rank's messages and of its share of the sums."""
        own, share = self._errors_of(bucket)
        yield "error", own, True
        yield "share_error", share, True

    def _errors_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        if bucket not in self._errors:
            own = torch.zeros(bucket.grads.shape, dtype=bucket.grads.dtype, device=bucket.grads.device)
            self._errors[bucket] = own, own.new_zeros(own.numel() // bucket.dp_group.size())
        return self._errors[bucket]

    def _moments_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return the whole momentum, and 1 for elements with a variance above 0, else 0."""
        momentum, trained = self.moments[bucket]["exp_avg"], self.moments[bucket]["exp_avg_sq"] > 0
        if not bucket.is_sharded:
            return momentum, trained
        if bucket not in self._gathered:
            whole, flags = momentum.new_empty(bucket.weights.numel()), trained.new_empty(bucket.weights.numel())
            all_gather_flat_(whole, momentum, bucket.dp_group)
            all_gather_flat_(flags, trained, bucket.dp_group)
            self._gathered[bucket] = whole, flags
        return self._gathered[bucket]


def _start_sum(tensors: list[Tensor], group: Group) -> tuple[list[Tensor], Handle]:
    """Start to sum all tensors over the group by one collective; the sums are valid after the handle's ``wait``."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)
    handle = all_reduce_(flat, group, async_op=True) if tensors else Done()
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)], handle


def _start_compression(x: Tensor, group: Group) -> tuple[Tensor, Tensor, Handle]:
    """Return the signs of ``x`` [8 n] as bits [n], and start the mean of its squares over the group's ranks.

    The root of the mean is the scale, which preserves the norm. It is the same for the whole group because copies of
    elements on several ranks must stay equal.
    """
    powers = 2 ** torch.arange(8, device=x.device)
    bits = ((x.view(-1, 8) >= 0) * powers).sum(-1).to(torch.uint8)
    mean = x.norm().square() / (x.numel() * group.size())
    return bits, mean, all_reduce_(mean, group, async_op=True)


def _decompressed(bits: Tensor, scale: Tensor) -> Tensor:
    powers = torch.arange(8, device=bits.device)
    signs = (bits.view(-1, 1).int() >> powers & 1).to(scale.dtype).mul_(2).sub_(1)
    return signs.view(-1).mul_(scale)


def _as_bytes(scale: Tensor) -> Tensor:
    return scale.view(1).view(torch.uint8)


def _parts_of(row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a message into its bits and its scale."""
    width = dtype.itemsize
    return row[:-width], row[-width:].clone().view(dtype)[0]
