"""The update of LAMB."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_core.data_parallel import Bucket
from megatron_core.features.lamb.settings import LAMBConfig
from megatron_core.features.lamb.whole_tensors import tensor_squares
from megatron_core.optimizer.rule import NEVER_CORRECTED, BucketAlgorithm, Rates, ShardSlice, write_copy


class LAMB(BucketAlgorithm):
    """You et al. 2019 (arXiv 1904.00962), algorithm 2.

    r = m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps) + wd w;  w = w - lr c r, with c = |w| / |r| of the whole tensor,
    limited to [lamb_min_coeff, lamb_max_coeff]; c = 1 if a norm is 0. A tensor of experts has one norm for all experts
    of a layer. ``lamb_bias_correction`` replaces the corrections 1 - b^t by 1, for ``rate`` with a factor of lr.
    """

    config: LAMBConfig

    def update(self, pieces: Sequence[ShardSlice], rates: Rates) -> None:
        """Update the moments and replace each gradient by r; ``finish_bucket`` updates the weights."""
        beta1, beta2 = rates.betas or (self.config.adam_beta1, self.config.adam_beta2)
        step = rates.step if self.bias_correction == "moments" else NEVER_CORRECTED
        for piece in pieces:
            momentum = piece.state["exp_avg"]
            variance = piece.state["exp_avg_sq"]
            # The direction replaces the gradient, so that no tensor of the shard's size is allocated.
            piece.grad.mul_(rates.factor)
            momentum.lerp_(piece.grad, 1.0 - beta1)
            variance.mul_(beta2).addcmul_(piece.grad, piece.grad, value=1.0 - beta2)
            size = variance.div(1.0 - beta2**step).sqrt_().add_(rates.epsilon)
            torch.div(momentum, size, out=piece.grad).div_(1.0 - beta1**step)
            piece.grad.add_(piece.main, alpha=rates.weight_decay)

    @property
    def bias_correction(self) -> str:
        """The value of ``lamb_bias_correction``."""
        return self.config.lamb_bias_correction

    def finish_bucket(self, bucket: Bucket, shard: ShardSlice, runs: Sequence[tuple[slice, Rates]]) -> None:
        """See ``BucketAlgorithm``."""
        self.move(bucket, shard, runs, self.coefficients(bucket, shard, runs))

    def move(
        self, bucket: Bucket, shard: ShardSlice, runs: Sequence[tuple[slice, Rates]], coefficients: Tensor
    ) -> None:
        """w = w - lr c r; ``coefficients``: c of each of the bucket's parameters."""
        factors = coefficients.to(shard.main.dtype)
        number = {parameter: index for index, parameter in enumerate(bucket.parameters)}
        # The learning rate first, in place; the coefficient of a tensor then needs no other factor.
        for run, rates in runs:
            betas = rates.betas or (self.config.adam_beta1, self.config.adam_beta2)
            first, second = (1.0 - beta**rates.step for beta in betas)
            shard.grad[run].mul_(rates.lr * (second**0.5 / first if self.bias_correction == "rate" else 1.0))
        for _, parameter, start, stop, offset in bucket.pieces():
            piece = slice(offset, offset + stop - start)
            shard.main[piece].sub_(shard.grad[piece] * factors[number[parameter]])
        write_copy(shard)

    def coefficients(self, bucket: Bucket, shard: ShardSlice, runs: Sequence[tuple[slice, Rates]]) -> Tensor:
        """Return c of each of the bucket's parameters, float64."""
        assert self.groups is not None
        weights, directions = tensor_squares(bucket, (shard.main, shard.grad), self.groups).sqrt()
        ratio = (weights / directions).clamp(self.config.lamb_min_coeff, self.config.lamb_max_coeff)
        # A new weight of zeros has norm 0 and would never move.
        return torch.where((weights > 0) & (directions > 0), ratio, torch.ones_like(ratio))
