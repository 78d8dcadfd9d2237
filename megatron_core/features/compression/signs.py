"""Sums of signs with error feedback: the momentum of 1-bit Adam and 1-bit LAMB, the gradients of 0/1 Adam.

``powersgd`` describes the rules of errors that these classes share with PowerSGD, ``updates`` has their update rules.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import embedding

from megatron_core.data_parallel.buffer import Bucket
from megatron_core.features.compression.stored import StoredCompressor
from megatron_core.optimizer.shard import Shard
from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_, start_all_to_all_rows
from megatron_core.parallel.groups import Group
from megatron_core.parallel.handles import Handle
from megatron_core.parallel.meter import COMPRESSED, METER

FRESH = "exp_avg_sq_fresh"
"""State of 1-bit LAMB: the variance that is still updated, in ``Shard.state``."""


class SignSums(StoredCompressor):
    """Tang et al. 2021, algorithm 1, lines 6 to 12: the sum of tensors of all ranks, each sent as its signs.

    c_i = x_i + e_i is sent as sign(c_i) |c_i| / sqrt(N), and e_i becomes the difference. Each rank sums its share of
    all ranks' messages, compresses the sum with a second error, and gathers the other ranks' shares.
    """

    def __init__(self) -> None:
        super().__init__()
        self.moments: dict[Bucket, dict[str, Tensor]] = {}
        """The optimizer's state by bucket."""
        self._errors: dict[Bucket, tuple[Tensor, Tensor]] = {}

    def commit(self, factor: float, limit: float) -> None:
        """See ``Compressor.commit``."""
        for bucket, pending in self._pending.items():
            for stored, fresh in zip(self._errors_of(bucket), pending, strict=True):
                stored.copy_(fresh)
        self._pending.clear()

    def attach(self, shards: Sequence[Shard], loss_scale: Callable[[], float]) -> None:
        """See ``Compressor.attach``."""
        super().attach(shards, loss_scale)
        self.moments = {shard.bucket: shard.state for shard in shards}

    def state(self, bucket: Bucket) -> Iterator[tuple[str, Tensor, bool]]:
        """Yield the errors of this rank's messages and of its share of the sums."""
        errors, share = self._errors_of(bucket)
        yield "error", errors, True
        yield "share_error", share, True

    def _sum(self, bucket: Bucket, message: Tensor, trained: Tensor) -> Generator[Handle, None, Tensor]:
        """Return the sum of ``message`` over the ranks, which has the bucket's length and is overwritten.

        Elements whose ``trained`` is 0, such as padding, have no sign: their sum and their error are 0.
        """
        errors, share = self._pending.get(bucket) or self._errors_of(bucket)
        group = bucket.dp_group
        size = bucket.dp_group.size()
        # Compress this rank's message and send each rank its share.
        message.add_(errors)
        bits, mean, handle = _start_compression(message, bucket.model_group)
        if bucket.model_group.size() > 1:
            yield handle
        scale = mean.sqrt()
        errors = (message - _decompressed(bits, scale)).mul_(trained)
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
        # Keep the errors until the step is taken.
        self._pending[bucket] = errors, share
        summed = torch.cat([_decompressed(*_parts_of(row, scale.dtype)) for row in gathered.view(size, -1)])
        return summed.mul_(trained)

    def _errors_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        if bucket not in self._errors:
            errors = torch.zeros(bucket.grads.shape, dtype=bucket.grads.dtype, device=bucket.grads.device)
            self._errors[bucket] = errors, errors.new_zeros(errors.numel() // bucket.dp_group.size())
        return self._errors[bucket]


class OneBitAdam(SignSums):
    """Tang et al. 2021, algorithm 1: after a warm-up Adam's variance is frozen and the signs of momenta are summed.

    The message of rank i is b1 m / n + (1 - b1) g_i, their sum is m'. Gradients become (m' - b1 m) / (1 - b1), from
    which Adam computes the momentum m'.

    Every rank needs the whole momentum. If the optimizer's state is sharded (ZeRO), the momenta and the signs of the
    variances are gathered once, and each rank repeats the update of the momentum.
    """

    def __init__(self, beta1: float, warmup: int) -> None:
        super().__init__()
        self.beta1 = beta1
        self.warmup = warmup
        self._sums: dict[Bucket, Tensor] = {}
        """Whole decompressed gradients of this step, for sharded buckets."""
        self._gathered: dict[Bucket, tuple[Tensor, Tensor]] = {}

    def is_active(self) -> bool:
        """Whether the warm-up is over."""
        return self.step >= self.warmup

    def reduce_(self, bucket: Bucket) -> Iterator[Handle]:
        """Replace ``bucket.grads`` by the gradient that leads to the summed momentum; see ``Compressor.reduce_``."""
        is_first = bucket not in self._pending
        loss_scale = self.loss_scale()
        scale = self._scale_of(bucket)
        momentum, trained = self._moments_of(bucket)
        message = bucket.grads * ((1.0 - self.beta1) / loss_scale)
        if is_first:
            message.add_(momentum, alpha=self.beta1 / bucket.dp_group.size())
        if scale is not None:
            message.mul_(scale)
        summed = yield from self._sum(bucket, message, trained)
        if scale is not None:
            summed.div_(scale)
        if is_first:
            summed.sub_(momentum, alpha=self.beta1)
        torch.mul(summed, loss_scale / (1.0 - self.beta1), out=bucket.grads)
        if bucket.is_sharded:
            self._sums[bucket] = bucket.grads.clone() if is_first else self._sums[bucket].add_(bucket.grads)

    def commit(self, factor: float, limit: float) -> None:
        """See ``Compressor.commit``; also update the gathered momenta, in the same way as Adam updates its shard."""
        super().commit(factor, limit)
        for bucket, grads in self._sums.items():
            grads.mul_(factor)
            if limit > 0.0:
                grads.clamp_(-limit, limit)
            self._gathered[bucket][0].lerp_(grads, 1.0 - self.beta1)
        self.discard()

    def discard(self) -> None:
        """See ``Compressor.discard``."""
        super().discard()
        self._sums.clear()

    def forget(self) -> None:
        """See ``StoredCompressor.forget``."""
        super().forget()
        self._gathered.clear()

    def _scale_of(self, bucket: Bucket) -> Tensor | None:
        """Return factors of the elements of a message, or None for 1."""
        return None

    def _moments_of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return the whole momentum, and 1 for elements with a variance above 0, else 0."""
        momentum = self.moments[bucket]["exp_avg"]
        trained = self.moments[bucket]["exp_avg_sq"] > 0
        if not bucket.is_sharded:
            return momentum, trained
        if bucket not in self._gathered:
            gathered = momentum.new_empty(bucket.weights.numel())
            flags = trained.new_empty(bucket.weights.numel())
            all_gather_flat_(gathered, momentum, bucket.dp_group)
            all_gather_flat_(flags, trained, bucket.dp_group)
            self._gathered[bucket] = gathered, flags
        return self._gathered[bucket]


class OneBitLAMB(OneBitAdam):
    """Li et al. 2021 (arXiv 2104.06069), algorithm 1: the compressed momentum of LAMB.

    One scale for a whole bucket would lose small momenta. So the momentum of each tensor is divided by its root mean
    square at the end of the warm-up before it is compressed, and multiplied by it afterwards.
    """

    def __init__(self, beta1: float, warmup: int) -> None:
        super().__init__(beta1, warmup)
        self._coefficients: dict[Bucket, Tensor] = {}

    def attach(self, shards: Sequence[Shard], loss_scale: Callable[[], float]) -> None:
        """See ``Compressor.attach``; also allocate the variance that is still updated."""
        super().attach(shards, loss_scale)
        for shard in shards:
            shard.state[FRESH] = torch.zeros_like(shard.state["exp_avg_sq"])

    def coefficients(self, bucket: Bucket) -> Tensor:
        """Return, for each parameter, the mean LAMB coefficient, its last factor, and the factor of its messages.

        float64 ``[parameters, 3]``; equal on all ranks with a part or a copy of a parameter.
        """
        if bucket not in self._coefficients:
            start = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64, device=bucket.weights.device)
            self._coefficients[bucket] = start.repeat(len(bucket.parameters), 1)
        return self._coefficients[bucket]

    def forget(self) -> None:
        """See ``StoredCompressor.forget``."""
        super().forget()
        self._coefficients.clear()

    def state_of_parameters(self, bucket: Bucket) -> Iterator[tuple[str, Tensor]]:
        """See ``StoredCompressor.state_of_parameters``."""
        yield "lamb", self.coefficients(bucket)

    def _scale_of(self, bucket: Bucket) -> Tensor:
        scale = torch.ones(bucket.grads.shape, dtype=bucket.grads.dtype, device=bucket.grads.device)
        factors = self.coefficients(bucket)[:, 2].to(scale.dtype)
        for factor, parameter, offset in zip(factors, bucket.parameters, bucket.offsets, strict=True):
            scale[offset : offset + parameter.numel()] = factor
        return scale


@dataclass(frozen=True)
class ZeroOnePolicy:
    """The steps in which 0/1 Adam updates the variance and synchronizes the ranks; steps count from 1."""

    var_freeze_step: int
    """The last step before the variance is frozen and local steps begin."""
    var_update_scaler: int
    """Number of updates of the variance after which their interval doubles."""
    local_step_scaler: int
    """Number of steps after which the interval of synchronizations doubles."""
    local_step_clipper: int
    """Largest interval of synchronizations."""

    def is_local(self, step: int) -> bool:
        """Whether ``step`` is a local step, without a sum of gradients."""
        return step > self.var_freeze_step

    def updates_variance(self, step: int) -> bool:
        """Whether ``step`` sums gradients without compression and updates the variance."""
        interval = 1
        began = 0
        while True:
            ends = interval * (began // interval + self.var_update_scaler)
            if step <= ends:
                return step % interval == 0 and not self.is_local(step)
            interval = 2 * interval
            began = ends

    def synchronizes(self, step: int) -> bool:
        """Whether the ranks sum their local changes after ``step``."""
        if not self.is_local(step):
            return False
        doublings = (step - self.var_freeze_step - 1) // self.local_step_scaler
        return step % min(self.local_step_clipper, 2 ** min(doublings, 62)) == 0


class ZeroOneAdam(SignSums):
    """Lu et al. 2022 (arXiv 2202.06009), algorithm 1: the messages of 0/1 Adam.

    Until the variance is frozen, gradients are summed: without compression in the steps that update the variance, else
    as signs. Then each rank takes local steps with its own gradient, times the number of ranks, so that its mean is the
    sum; ``updates`` sums the changes of the weights, through ``sum_now``.
    """

    def __init__(self, policy: ZeroOnePolicy) -> None:
        super().__init__()
        self.policy = policy

    def is_active(self) -> bool:
        """Whether the next step does not sum whole gradients."""
        return not self.policy.updates_variance(self.step + 1)

    def is_local(self) -> bool:
        """Whether the next step is a local step; see ``Compressor.is_local``."""
        return self.policy.is_local(self.step + 1)

    def reduce_(self, bucket: Bucket) -> Iterator[Handle]:
        """Replace ``bucket.grads`` by their sum, or by this rank's estimate of it; see ``Compressor.reduce_``."""
        if self.is_local():
            bucket.grads.mul_(bucket.dp_group.size())
            return
        loss_scale = self.loss_scale()
        summed = yield from self._sum(bucket, bucket.grads / loss_scale, self.moments[bucket]["exp_avg_sq"] > 0)
        torch.mul(summed, loss_scale, out=bucket.grads)

    def commit(self, factor: float, limit: float) -> None:
        """See ``Compressor.commit``; after the last sum of gradients their errors are dropped: changes follow."""
        super().commit(factor, limit)
        if self.step == self.policy.var_freeze_step:
            self._errors.clear()

    def sum_now(self, bucket: Bucket, message: Tensor, trained: Tensor) -> Tensor:
        """Return the sum of ``message`` over the ranks and store the errors; ``message`` is overwritten."""
        if bucket.dp_group.size() == 1:
            return message.mul_(trained)
        summing = self._sum(bucket, message, trained)
        while True:
            try:
                with METER.labelled(COMPRESSED):
                    arriving = next(summing)
                arriving.wait()
            except StopIteration as end:
                super().commit(1.0, 0.0)
                return end.value


_PACK = sum(1 << (56 - 7 * bit) for bit in range(8))
"""Five times as fast as a sum of powers of 2 for each bit, on a CPU."""


def _start_compression(x: Tensor, group: Group) -> tuple[Tensor, Tensor, Handle]:
    """Return the signs of ``x`` [8 n] as bits [n], and start the mean of its squares over the group's ranks.

    The root of the mean is the scale, which preserves the norm. It is the same for the whole group because copies of
    elements on several ranks must stay equal.
    """
    # A comparison is 8 bytes of 0 or 1; the product of this word and _PACK has them in its highest byte.
    bits = ((x >= 0).view(torch.int64) * _PACK >> 56).to(torch.uint8)
    mean = x.norm().square() / (x.numel() * group.size())
    return bits, mean, all_reduce_(mean, group, async_op=True)


def _decompressed(bits: Tensor, scale: Tensor) -> Tensor:
    powers = torch.arange(8, device=bits.device)
    table = (torch.arange(256, device=bits.device).view(-1, 1) >> powers & 1).to(scale.dtype).mul_(2).sub_(1)
    return embedding(bits.int(), table.mul_(scale)).view(-1)


def _as_bytes(scale: Tensor) -> Tensor:
    return scale.view(1).view(torch.uint8)


def _parts_of(row: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split a message into its bits and its scale."""
    width = dtype.itemsize
    return row[:-width], row[-width:].clone().view(dtype)[0]
