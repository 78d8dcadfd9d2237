"""AdamW on main weights that live in flat shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megatron_core.config import OptimizerConfig
from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.ops import Backend, adamw_
from megatron_core.optimizer.clip import GradientNorm, clip_factor
from megatron_core.optimizer.loss_scale import ConstantLossScale, DynamicLossScale
from megatron_core.parallel.groups import ParallelGroups


class LossScale(Protocol):
    """The factor on the loss, and its reaction to gradients that overflowed."""

    scale: float

    def update(self, found_inf: bool) -> None:
        """Take note of a step."""
        ...


@dataclass(frozen=True)
class StepOutcome:
    """What an optimizer step did."""

    grad_norm: float
    """Global gradient norm before clipping, the loss scale divided out."""
    skipped: bool
    """Whether the weights stayed because a gradient was not finite."""


@dataclass(frozen=True, eq=False)
class Shard:
    """What AdamW keeps for its part of a bucket: flat, and as long as that."""

    bucket: Bucket
    main: Tensor
    """The weights in float32 or wider: the bucket's very own where those are so wide."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def of(cls, bucket: Bucket) -> Shard:
        """Take the weights as they are, and moments of zero."""
        main = bucket.weight_shard.to(torch.promote_types(bucket.weights.dtype, torch.float32))
        return cls(bucket, main, torch.zeros_like(main), torch.zeros_like(main))

    @property
    def is_narrow(self) -> bool:
        """Whether the model's weights are 16 bits, and so a copy of ``main``."""
        return self.main.dtype != self.bucket.weights.dtype


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on each bucket's shard of the weights, in one pass over all that it touches.

    16-bit weights have float32 main weights; wider weights are their own. With sharded buckets each data-parallel rank
    updates its shard only: ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1).
    """

    def __init__(
        self,
        data_parallel: DataParallel,
        config: OptimizerConfig,
        groups: ParallelGroups,
        loss_scale: LossScale,
        backend: Backend = "auto",
    ) -> None:
        self.config, self.loss_scale, self.backend = config, loss_scale, backend
        self.norm = GradientNorm(data_parallel, groups, backend)
        # The moments are here from now on, so that a checkpoint can be loaded before the first step.
        self.shards = [Shard.of(bucket) for bucket in data_parallel.buckets]
        self.steps_taken = 0

    def step(self, lr: float) -> StepOutcome:
        """Clip and update, on gradients that are complete; skip if any of them is not finite.

        Afterwards the gradients are used up: they may have been scaled.
        """
        scale = self.loss_scale.scale
        norm = self.norm.compute() / scale
        finite = math.isfinite(norm)
        self.loss_scale.update(not finite)
        if not finite:
            return StepOutcome(norm, skipped=True)
        self.steps_taken += 1
        factor = clip_factor(norm, self.config.clip_grad) / scale
        for (decays, _), shards in self._alike().items():
            self._update(shards, lr, factor, self.config.weight_decay if decays else 0.0)
        return StepOutcome(norm, skipped=False)

    def _alike(self) -> dict[tuple[bool, torch.dtype], list[Shard]]:
        """Shards that one call updates: all decay or none does, and their weights are of one dtype."""
        alike = defaultdict(list)
        for shard in self.shards:
            alike[shard.bucket.kind.decay, shard.bucket.weights.dtype].append(shard)
        return alike

    def _update(self, shards: list[Shard], lr: float, factor: float, weight_decay: float) -> None:
        adamw_(
            [shard.bucket.grad_shard for shard in shards],
            [shard.main for shard in shards],
            [shard.exp_avg for shard in shards],
            [shard.exp_avg_sq for shard in shards],
            [shard.bucket.weight_shard for shard in shards if shard.is_narrow],
            step=self.steps_taken,
            lr=lr,
            betas=(self.config.adam_beta1, self.config.adam_beta2),
            epsilon=self.config.adam_eps,
            weight_decay=weight_decay,
            factor=factor,
            backend=self.backend,
        )

    def tensors(self) -> Iterator[tuple[Bucket, dict[str, Tensor]]]:
        """Each bucket with its flat state: ``exp_avg``, ``exp_avg_sq`` and, for 16-bit weights, ``main``."""
        for shard in self.shards:
            named = {"exp_avg": shard.exp_avg, "exp_avg_sq": shard.exp_avg_sq}
            yield shard.bucket, named | ({"main": shard.main} if shard.is_narrow else {})

    def set_steps_taken(self, steps: int) -> None:
        """Restore the count that AdamW's bias correction uses."""
        self.steps_taken = steps


def make_loss_scale(config: OptimizerConfig, params_dtype: torch.dtype) -> LossScale:
    """Dynamic for float16 unless a fixed one is given; 1 for every other dtype."""
    if params_dtype != torch.float16:
        return ConstantLossScale(1.0)
    if config.loss_scale is not None:
        return ConstantLossScale(config.loss_scale)
    return DynamicLossScale(
        initial=config.initial_loss_scale,
        minimum=config.min_loss_scale,
        window=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )
