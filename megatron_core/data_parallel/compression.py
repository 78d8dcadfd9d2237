"""Compressed gradient sums with error feedback: PowerSGD, and the momentum of 1-bit Adam.

Both keep on each rank the compression error of its last message and add it to the next message, so that no contribution
is lost, only delayed. Each rank compresses its own tensor-parallel part of a matrix, so results depend on the
tensor-parallel size, as with all lossy compression; errors belong to a data-parallel rank.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from math import prod

import torch
from torch import Tensor

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_, all_to_all_rows
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
        self._factors: dict[Bucket, list[Tensor]] = {}
        self._errors: dict[Bucket, Tensor] = {}

    def is_active(self) -> bool:
        """Whether the warm-up is over."""
        return self.step >= self.warmup

    def reduce_(self, bucket: Bucket) -> int:
        """Replace ``bucket.grads`` by their approximate sum; return the number of bytes that this rank sent."""
        errors, factors = self._state_of(bucket)
        group = bucket.dp_group
        # Add the errors; sum the left factors.
        bucket.grads.add_(errors)
        matrices, rest = self._split(bucket)
        lefts = _sum_together([m @ q for m, q in zip(matrices, factors, strict=True)], group)
        if not all(bool(left.isfinite().all()) for left in lefts):  # the same on every rank: the step will be skipped
            bucket.grads.fill_(torch.nan)
            return sum(left.nbytes for left in lefts)
        # Orthogonalise the left factors; sum the right factors and the uncompressed parameters.
        lefts = [torch.linalg.qr(left).Q for left in lefts]
        sent = sum(left.nbytes for left in lefts)
        rights = _sum_together([m.mT @ p for m, p in zip(matrices, lefts, strict=True)], group)
        plain = _sum_together(rest, group)
        # Replace the gradients, and store the errors and factors for the next step.
        errors.copy_(bucket.grads)
        for matrix, error, left, right, factor in zip(
            matrices, self._split(bucket, errors)[0], lefts, rights, factors, strict=True
        ):
            torch.mm(left, right.mT, out=matrix)
            error.sub_(matrix, alpha=1.0 / group.size())
            factor.copy_(right)
        for piece, error, total in zip(rest, self._split(bucket, errors)[1], plain, strict=True):
            piece.copy_(total)
            error.zero_()
        errors[bucket.end :] = 0.0
        return sent + sum(tensor.nbytes for tensor in (*rights, *plain))

    def state(self, bucket: Bucket) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the errors of this rank and the factors, which are equal on all ranks."""
        errors, factors = self._state_of(bucket)
        yield "error", errors, True
        for number, factor in enumerate(factors):
            yield f"factor{number}", factor, False

    def rescale(self, factor: float) -> None:
        """See ``Compressor.rescale``."""
        _rescale(self._errors.values(), factor)

    def _state_of(self, bucket: Bucket) -> tuple[Tensor, list[Tensor]]:
        if bucket not in self._errors:
            self._errors[bucket] = torch.zeros_like(bucket.grads)
            self._factors[bucket] = [self._draw(bucket, n, m) for n, m in enumerate(self._split(bucket)[0])]
        return self._errors[bucket], self._factors[bucket]

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
    """

    def __init__(self, beta1: float, warmup: int) -> None:
        self.beta1, self.warmup, self.step = beta1, warmup, 0
        self.moments: dict[Bucket, dict[str, Tensor]] = {}
        """Adam's state by bucket, set by the optimizer."""
        self._errors: dict[Bucket, tuple[Tensor, Tensor]] = {}

    def is_active(self) -> bool:
        """Whether the warm-up is over."""
        return self.step >= self.warmup

    def reduce_(self, bucket: Bucket) -> int:
        """Replace ``bucket.grads`` by the gradient that leads to the summed momentum; return the bytes that this rank
        sent.
        """
        own, share = self._errors_of(bucket)
        group, size = bucket.dp_group, bucket.dp_group.size()
        momentum, variance = self.moments[bucket]["exp_avg"], self.moments[bucket]["exp_avg_sq"]
        message = momentum * (self.beta1 / size) + (1.0 - self.beta1) * bucket.grads + own
        bits, scale = _compressed(message, bucket.model_group)
        scales = scale.new_empty(size)
        all_gather_flat_(scales, scale.view(1), group)
        if not bool(scales.isfinite().all()):  # the same on every rank: the step is skipped, so no error is stored
            bucket.grads.fill_(torch.nan)
            return scale.nbytes
        trained = variance > 0  # padding has variance 0: no sign, and no error, since checkpoints do not contain one
        own.copy_(message - _decompressed(bits, scale)).mul_(trained)
        received = all_to_all_rows(bits.view(size, -1), [1] * size, [1] * size, group)
        total = share.clone()
        for part, factor in zip(received, scales, strict=True):
            total += _decompressed(part, factor)
        share_bits, share_scale = _compressed(total, bucket.model_group)
        share.copy_(total - _decompressed(share_bits, share_scale)).mul_(trained.view(size, -1)[group.rank()])
        all_gather_flat_(bits, share_bits, group)
        all_gather_flat_(scales, share_scale.view(1), group)
        parts = zip(bits.view(size, -1), scales, strict=True)
        summed = torch.cat([_decompressed(part, factor) for part, factor in parts])
        summed.mul_(trained)
        torch.sub(summed, momentum, alpha=self.beta1, out=bucket.grads).div_(1.0 - self.beta1)
        return bits.nbytes + share_bits.nbytes + 2 * scale.nbytes

    def state(self, bucket: Bucket) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the errors of this rank's messages and of its share of the sums."""
        own, share = self._errors_of(bucket)
        yield "error", own, True
        yield "share_error", share, True

    def rescale(self, factor: float) -> None:
        """See ``Compressor.rescale``."""
        _rescale(chain.from_iterable(self._errors.values()), factor)

    def _errors_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        if bucket not in self._errors:
            own = torch.zeros_like(bucket.grads)
            self._errors[bucket] = own, own.new_zeros(own.numel() // bucket.dp_group.size())
        return self._errors[bucket]


def _rescale(errors: Iterable[Tensor], factor: float) -> None:
    for error in errors:
        error.mul_(factor) if factor else error.zero_()


def _sum_together(tensors: list[Tensor], group: Group) -> list[Tensor]:
    """Return the sums of all tensors over the group, computed by one collective."""
    if not tensors:
        return []
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    all_reduce_(flat, group)
    pieces = flat.split([tensor.numel() for tensor in tensors])
    return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]


def _compressed(x: Tensor, group: Group) -> tuple[Tensor, Tensor]:
    """Return the signs of ``x`` [8 n] as bits [n], and the scale that preserves the norm over the group's ranks.

    The scale is the same for the whole group because copies of elements on several ranks must stay equal.
    """
    powers = 2 ** torch.arange(8, device=x.device)
    bits = ((x.view(-1, 8) >= 0) * powers).sum(-1).to(torch.uint8)
    mean = x.norm().square() / (x.numel() * group.size())
    all_reduce_(mean, group)
    return bits, mean.sqrt()


def _decompressed(bits: Tensor, scale: Tensor) -> Tensor:
    powers = torch.arange(8, device=bits.device)
    signs = (bits.view(-1, 1).int() >> powers & 1).to(scale.dtype).mul_(2).sub_(1)
    return signs.view(-1).mul_(scale)
