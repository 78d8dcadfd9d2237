"""AdamW on main weights in flat shards."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_core.config import OptimizerConfig
from megatron_core.data_parallel import Bucket, DataParallel
from megatron_core.ops import Backend, adamw_
from megatron_core.optimizer.clip import GradientNorm, clip_factor
from megatron_core.optimizer.loss_scale import ConstantLossScale, DynamicLossScale
from megatron_core.parallel.groups import ParallelGroups


class LossScale(Protocol):
    """The factor by which the loss is multiplied, and its update after an overflow."""

    scale: float

    def update(self, found_inf: bool) -> None:
        """Update after a step."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run continues with."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state_dict``."""
        ...


@dataclass(frozen=True, eq=False)
class Shard:
    """The state of AdamW for this rank's shard of a bucket: flat tensors of the shard's length."""

    bucket: Bucket
    main: Tensor
    """The weights in float32 or wider: the bucket's own tensor if that is wide enough."""
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @classmethod
    def of(cls, bucket: Bucket) -> Shard:
        """Start from the bucket's weights, with moments of zero."""
        main = bucket.weight_shard.to(torch.promote_types(bucket.weights.dtype, torch.float32))
        return cls(bucket, main, torch.zeros_like(main), torch.zeros_like(main))

    @property
    def is_narrow(self) -> bool:
        """Whether the model's weights are 16-bit copies of ``main``."""
        return self.main.dtype != self.bucket.weights.dtype


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on this rank's shard of every bucket.

    16-bit weights have float32 main weights; wider weights are updated directly. With sharded buckets each
    data-parallel rank updates only its shard: ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1).
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
        # Allocated now, so that a checkpoint can be loaded before the first step.
        self.shards = [Shard.of(bucket) for bucket in data_parallel.buckets]
        self.steps_taken = 0

    def gradient_norm(self) -> Tensor:
        """The global norm of the reduced gradients, without the loss scale: a float64 scalar on the device; inf or nan
        if any gradient on any rank is."""
        return self.norm.compute() / self.loss_scale.scale

    def step(self, lr: float, grad_norm: float) -> bool:
        """Clip to ``grad_norm``, which is ``gradient_norm()``, and update; skip if it is not finite.

        Returns whether the step was skipped. The gradients may be scaled in place.
        """
        scale, finite = self.loss_scale.scale, math.isfinite(grad_norm)
        self.loss_scale.update(not finite)
        if not finite:
            return True
        self.steps_taken += 1
        factor = clip_factor(grad_norm, self.config.clip_grad) / scale
        for (decays, _), shards in self._by_kind().items():
            self._update(shards, lr, factor, self.config.weight_decay if decays else 0.0)
        return False

    def _by_kind(self) -> dict[tuple[bool, torch.dtype], list[Shard]]:
        """The shards by (weight decay or not, dtype); one call updates each group."""
        found = defaultdict(list)
        for shard in self.shards:
            found[shard.bucket.kind.decay, shard.bucket.weights.dtype].append(shard)
        return found

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
    """For float16 the constant ``loss_scale`` if given, else a dynamic one; 1 for every other dtype."""
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
