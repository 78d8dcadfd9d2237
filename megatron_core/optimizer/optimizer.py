"""AdamW on main weights that live in flat shards."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_core.config import OptimizerConfig
from megatron_core.data_parallel import Bucket, DataParallel
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


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on each bucket's shard of the weights, by torch's fused kernel.

    16-bit weights have float32 main weights; wider weights are their own. With sharded buckets each data-parallel rank
    updates its shard only: ZeRO stage 1 (Rajbhandari et al. 2020, section 5.1).
    """

    def __init__(
        self,
        data_parallel: DataParallel,
        config: OptimizerConfig,
        groups: ParallelGroups,
        loss_scale: LossScale,
    ) -> None:
        self.buckets, self.config, self.loss_scale = data_parallel.buckets, config, loss_scale
        self.norm = GradientNorm(data_parallel, groups)
        self.main = [nn.Parameter(_main_weights(bucket), requires_grad=False) for bucket in self.buckets]
        groups_of = [
            {"params": [main], "weight_decay": config.weight_decay if bucket.kind.decay else 0.0}
            for main, bucket in zip(self.main, self.buckets, strict=True)
        ]
        self.adam = torch.optim.AdamW(
            groups_of or [{"params": []}],  # a rank that only hands hidden states on
            lr=config.lr,
            betas=(config.adam_beta1, config.adam_beta2),
            eps=config.adam_eps,
            fused=True,
        )
        self.steps_taken = 0
        self._make_state()

    def _make_state(self) -> None:
        """Allocate the moments now, so that a checkpoint can be loaded before the first step."""
        for main in self.main:
            self.adam.state[main] = {
                "step": torch.zeros((), dtype=torch.float32, device=main.device),
                "exp_avg": torch.zeros_like(main),
                "exp_avg_sq": torch.zeros_like(main),
            }

    def step(self, lr: float) -> StepOutcome:
        """Clip, update and copy back, on gradients that are complete; skip if any of them is not finite."""
        scale = self.loss_scale.scale
        norm = self.norm.compute() / scale
        finite = math.isfinite(norm)
        self.loss_scale.update(not finite)
        if not finite:
            return StepOutcome(norm, skipped=True)
        factor = clip_factor(norm, self.config.clip_grad) / scale
        for group in self.adam.param_groups:
            group["lr"] = lr
        for main, bucket in zip(self.main, self.buckets, strict=True):
            main.grad = bucket.grad_shard if factor == 1.0 else bucket.grad_shard.mul_(factor)
        self.adam.step()
        self.steps_taken += 1
        self._copy_back()
        return StepOutcome(norm, skipped=False)

    @torch.no_grad()
    def _copy_back(self) -> None:
        for main, bucket in zip(self.main, self.buckets, strict=True):
            if main.dtype != bucket.weights.dtype:
                bucket.weight_shard.copy_(main)

    def tensors(self) -> Iterator[tuple[Bucket, dict[str, Tensor]]]:
        """Each bucket with its flat state: ``exp_avg``, ``exp_avg_sq`` and, for 16-bit weights, ``main``."""
        for main, bucket in zip(self.main, self.buckets, strict=True):
            state = self.adam.state[main]
            named = {"exp_avg": state["exp_avg"], "exp_avg_sq": state["exp_avg_sq"]}
            if main.dtype != bucket.weights.dtype:
                named["main"] = main.data
            yield bucket, named

    def set_steps_taken(self, steps: int) -> None:
        """Restore the count that AdamW's bias correction uses."""
        self.steps_taken = steps
        for main in self.main:
            self.adam.state[main]["step"].fill_(steps)


def _main_weights(bucket: Bucket) -> Tensor:
    """The bucket's shard in float32 or wider: a copy of 16-bit weights, the very storage of others."""
    return bucket.weight_shard.to(torch.promote_types(bucket.weights.dtype, torch.float32))


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
