"""Updates of weights with sums of signs: 1-bit Adam, 1-bit LAMB and 0/1 Adam. ``signs`` has their messages."""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from megatron_core.config import OptimizerConfig
from megatron_core.data_parallel import Bucket
from megatron_core.features.compression.settings import CompressionConfig
from megatron_core.features.compression.signs import FRESH, OneBitAdam, OneBitLAMB, ZeroOneAdam
from megatron_core.features.lamb.update import LAMB
from megatron_core.features.lamb.whole_tensors import reduce_over_tensors, tensor_squares
from megatron_core.optimizer.algorithms import AdamW
from megatron_core.optimizer.rule import NEVER_CORRECTED, BucketAlgorithm, Rates, ShardSlice, write_copy
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.sharding import spec_of


class OneBitAdamUpdate(AdamW):
    """Tang et al. 2021, algorithm 1: AdamW whose variance is frozen after the warm-up.

    m = b1 m + (1 - b1) g;  w = (1 - lr wd) w - lr m / (1 - b1^t) / (sqrt(v / (1 - b2^frozen)) + eps).
    """

    def __init__(self, config: OptimizerConfig, groups: ParallelGroups, compressor: OneBitAdam) -> None:
        super().__init__(config, groups=groups)
        self.compressor = compressor

    def update(self, pieces: Sequence[ShardSlice], rates: Rates) -> None:
        """Update all parts; after the warm-up without the variance."""
        if rates.step <= self.compressor.warmup:
            super().update(pieces, rates)
            return
        step = NEVER_CORRECTED
        frozen = NEVER_CORRECTED
        if self.config.adam_bias_correction:
            step = rates.step
            frozen = max(self.compressor.warmup, 1)
        beta1 = self.config.adam_beta1
        correction = 1.0 - self.config.adam_beta2**frozen
        for piece in pieces:
            momentum = piece.state["exp_avg"]
            momentum.lerp_(piece.grad.mul_(rates.factor).to(momentum.dtype), 1.0 - beta1)
            size = piece.state["exp_avg_sq"].div(correction).sqrt_().add_(rates.epsilon)
            piece.main.mul_(1.0 - rates.lr * rates.weight_decay)
            piece.main.addcdiv_(momentum, size, value=-rates.lr / (1.0 - beta1**step))
            write_copy(piece)


class OneBitLAMBUpdate(LAMB):
    """Li et al. 2021 (arXiv 2104.06069), algorithm 1: LAMB without bias correction whose variance v is frozen.

    In the warm-up, the mean coefficient of each tensor is a = b a + (1 - b) c for every c other than 1. Afterwards
    c = a f with f = max((sqrt(v) + eps) / (sqrt(v') + eps)), where v' is a variance that is still updated, from the
    gradients of the summed momenta. With weight decay, f = f s + 1 - s, where s = |m / (sqrt(v) + eps)| / |r|, at most
    1. f is limited to [factor_min, factor_max] and to a change by the share factor_threshold in a step.
    """

    def __init__(
        self, config: OptimizerConfig, groups: ParallelGroups, compressor: OneBitLAMB, settings: CompressionConfig
    ) -> None:
        super().__init__(config, groups=groups)
        self.compressor = compressor
        self.settings = settings

    @property
    def bias_correction(self) -> str:
        """None: the frozen variance belongs to one step."""
        return "none"

    def update(self, pieces: Sequence[ShardSlice], rates: Rates) -> None:
        """Update the moments and replace each gradient by r."""
        if rates.step <= self.compressor.warmup:
            super().update(pieces, rates)
            for piece in pieces if rates.step == self.compressor.warmup else ():
                piece.state[FRESH].copy_(piece.state["exp_avg_sq"])
            return
        beta1, beta2 = self.config.adam_beta1, self.config.adam_beta2
        for piece in pieces:
            momentum = piece.state["exp_avg"]
            grad = piece.grad.mul_(rates.factor)
            momentum.lerp_(grad, 1.0 - beta1)
            piece.state[FRESH].mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            torch.div(momentum, piece.state["exp_avg_sq"].sqrt().add_(rates.epsilon), out=piece.grad)
            piece.grad.add_(piece.main, alpha=rates.weight_decay)

    def coefficients(self, bucket: Bucket, shard: ShardSlice, runs: Sequence[tuple[slice, Rates]]) -> Tensor:
        """Return c of each of the bucket's parameters, float64; keep the means and factors."""
        means = self.compressor.coefficients(bucket)
        step = runs[0][1].step
        if step > self.compressor.warmup:
            factors = self._factors(bucket, shard, runs, means[:, 1])
            means[:, 1] = factors
            return means[:, 0] * factors
        coefficients = super().coefficients(bucket, shard, runs)
        beta = self.settings.onebit_lamb_coeff_beta
        means[:, 0] = torch.where(coefficients == 1.0, means[:, 0], beta * means[:, 0] + (1.0 - beta) * coefficients)
        if step == self.compressor.warmup:
            means[:, 2] = self._message_factors(bucket, shard)
        return coefficients

    def _factors(
        self, bucket: Bucket, shard: ShardSlice, runs: Sequence[tuple[slice, Rates]], previous: Tensor
    ) -> Tensor:
        """Return f of each parameter; ``previous`` are those of the last step."""
        assert self.groups is not None
        settings = self.settings
        ratio = torch.ones_like(shard.main)
        plain = shard.grad.clone()
        for run, rates in runs:
            frozen, fresh = (shard.state[name][run].sqrt().add_(rates.epsilon) for name in ("exp_avg_sq", FRESH))
            ratio[run] = frozen / fresh
            plain[run].sub_(shard.main[run], alpha=rates.weight_decay)
        largest = torch.zeros_like(previous)
        number = {parameter: index for index, parameter in enumerate(bucket.parameters)}
        for _, parameter, start, stop, offset in bucket.pieces():
            largest[number[parameter]] = ratio[offset : offset + stop - start].max()
        reduce_over_tensors(bucket, largest, self.groups, maximum=True)
        if any(rates.weight_decay for _, rates in runs):
            undecayed, directions = tensor_squares(bucket, (plain, shard.grad), self.groups).sqrt()
            share = torch.where(directions > 0, undecayed / directions, torch.ones_like(directions)).clamp(max=1.0)
            largest = largest * share + 1.0 - share
        limited = largest.clamp(settings.onebit_lamb_factor_min, settings.onebit_lamb_factor_max)
        threshold = settings.onebit_lamb_factor_threshold
        return torch.maximum(torch.minimum(limited, previous * (1.0 + threshold)), previous * (1.0 - threshold))

    def _message_factors(self, bucket: Bucket, shard: ShardSlice) -> Tensor:
        """Return 1 / (root mean square of the momentum) of each parameter; 1 for a momentum of 0."""
        assert self.groups is not None
        (squares,) = tensor_squares(bucket, (shard.state["exp_avg"],), self.groups)
        sizes = squares.new_tensor([prod(spec_of(parameter).global_shape) for parameter in bucket.parameters])
        return torch.where(squares > 0, (squares / sizes).rsqrt(), torch.ones_like(squares))


class LocalChange:
    """The change of a bucket's weights on this rank since the ranks were equal."""

    def __init__(self, shard: ShardSlice, runs: int) -> None:
        self.origin = shard.main.clone()
        """The weights when the ranks were equal."""
        self.change = torch.zeros_like(shard.main)
        self.rates = [0.0] * runs
        """Sum of the learning rates of each run."""
        self.runs: Sequence[tuple[slice, Rates]] = ()


class ZeroOneAdamUpdate(BucketAlgorithm):
    """Lu et al. 2022 (arXiv 2202.06009), algorithm 1: Adam without bias correction and with local steps.

    r = m / (sqrt(v) + eps) + wd w; w = w - lr r. After the variance is frozen, each rank takes steps with its own m and
    adds them to a change u of its weights. A synchronization sums u (sqrt(v) + eps) / n over the n ranks as signs, to
    s; then w = w0 + s / (sqrt(v) + eps), where w0 are the weights of the synchronization before, m = -s / (sum of the
    learning rates since then), and u = 0. Elements whose variance is 0 do not move after it is frozen.
    """

    def __init__(self, config: OptimizerConfig, groups: ParallelGroups, compressor: ZeroOneAdam) -> None:
        super().__init__(config, groups=groups)
        self.compressor = compressor
        self.pending: dict[Bucket, LocalChange] = {}
        """Changes that are not synchronized."""

    def update(self, pieces: Sequence[ShardSlice], rates: Rates) -> None:
        """Update the moments and replace each gradient by r."""
        beta1 = self.config.adam_beta1
        beta2 = self.config.adam_beta2
        policy = self.compressor.policy
        for piece in pieces:
            momentum = piece.state["exp_avg"]
            variance = piece.state["exp_avg_sq"]
            grad = piece.grad.mul_(rates.factor)
            if policy.updates_variance(rates.step):
                variance.mul_(beta2).addcmul_(grad, grad, value=1.0 - beta2)
            elif policy.is_local(rates.step):
                grad.mul_(variance > 0)
            momentum.lerp_(grad, 1.0 - beta1)
            torch.div(momentum, variance.sqrt().add_(rates.epsilon), out=piece.grad)
            piece.grad.add_(piece.main, alpha=rates.weight_decay)

    def finish_bucket(self, bucket: Bucket, shard: ShardSlice, runs: Sequence[tuple[slice, Rates]]) -> None:
        """Move the weights; synchronize them if this step does."""
        policy = self.compressor.policy
        step = runs[0][1].step
        if not policy.is_local(step):
            for run, rates in runs:
                shard.main[run].sub_(shard.grad[run], alpha=rates.lr)
            write_copy(shard)
            return
        if bucket not in self.pending:
            self.pending[bucket] = LocalChange(shard, len(runs))
        local = self.pending[bucket]
        local.runs = runs
        for number, (run, rates) in enumerate(runs):
            local.change[run].sub_(shard.grad[run], alpha=rates.lr)
            local.rates[number] += rates.lr
        torch.add(local.origin, local.change, out=shard.main)
        write_copy(shard)
        if policy.synchronizes(step):
            self.synchronize(bucket, shard)

    def has_local_changes(self, bucket: Bucket) -> bool:
        """See ``Algorithm.has_local_changes``."""
        return bucket in self.pending

    def forget_local_changes(self) -> None:
        """See ``Algorithm.forget_local_changes``."""
        self.pending.clear()

    def synchronize(self, bucket: Bucket, shard: ShardSlice) -> None:
        """Sum the changes of all ranks; afterwards their weights and momenta are equal. A collective call."""
        local = self.pending.pop(bucket, None)
        if local is None:
            return
        trained = (shard.state["exp_avg_sq"] > 0).to(local.change.dtype)
        size = torch.ones_like(local.change)
        for (run, rates), total in zip(local.runs, local.rates, strict=True):
            size[run] = shard.state["exp_avg_sq"][run].sqrt().add_(rates.epsilon)
            trained[run].mul_(total > 0.0)
        message = (local.change * size).mul_(trained).div_(bucket.dp_group.size())
        summed = self.compressor.sum_now(bucket, message, trained)
        for (run, _), total in zip(local.runs, local.rates, strict=True):
            # Without a learning rate nothing has moved, and the ranks' momenta are not known to each other.
            torch.mul(summed[run], -1.0 / total if total > 0.0 else 0.0, out=shard.state["exp_avg"][run])
        torch.addcdiv(local.origin, summed, size, out=shard.main)
        write_copy(shard)
