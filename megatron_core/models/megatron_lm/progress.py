"""The counters and training settings that Megatron-LM stores with its weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_core.config.file import convert, field_types
from megatron_core.errors import CheckpointError

SETTINGS = (
    *("optimizer", "lr", "min_lr", "lr_decay_style", "lr_decay_iters", "lr_decay_samples", "lr_warmup_iters"),
    *("lr_warmup_samples", "lr_warmup_fraction", "lr_warmup_init", "lr_wsd_decay_style", "lr_wsd_decay_iters"),
    *("lr_wsd_decay_samples", "weight_decay", "start_weight_decay", "end_weight_decay", "weight_decay_incr_style"),
    *("adam_beta1", "adam_beta2", "adam_eps", "decoupled_lr", "decoupled_min_lr", "clip_grad"),
    *("global_batch_size", "micro_batch_size", "train_iters", "train_samples", "seed", "bf16", "fp16"),
)
"""Training settings that have the same name and meaning in both programs."""


@dataclass(frozen=True)
class Progress:
    """The position of a training and the settings that continue it."""

    iteration: int
    consumed_samples: int
    optimizer_steps: int
    settings: Mapping[str, Any]

    @classmethod
    def of(cls, common: Mapping[str, Any], arguments: Mapping[str, Any], optimizer: Any, folder: Path) -> Progress:
        """Read the counters; errors: ``CheckpointError`` for one that is absent or not a number."""
        counters = {
            "iteration": common.get("iteration"),
            "consumed_train_samples": arguments.get("consumed_train_samples"),
            "optimizer step": _step(optimizer),
        }
        for name, value in counters.items():
            if type(value) is not int or value < 0:
                raise CheckpointError(
                    f"{folder} has no valid {name} ({value!r}), which training needs to continue; convert the weights "
                    "alone with --no-optimizer"
                )
        kinds, found = field_types(), {}
        for name in SETTINGS:
            if arguments.get(name) is not None:
                try:
                    found[name] = convert(arguments[name], kinds[name])
                except (TypeError, ValueError, OverflowError):
                    raise CheckpointError(
                        f"the checkpoint was trained with {name}={arguments[name]!r}, which is not supported; convert "
                        "the weights alone with --no-optimizer"
                    ) from None
        iteration, samples, steps = (int(value) for value in counters.values() if value is not None)
        return cls(iteration, samples, steps, found)


def _step(optimizer: Any) -> int | None:
    """Adam's step count, which each optimizer class of Megatron Core stores elsewhere."""
    if not isinstance(optimizer, dict):
        return None
    inner = optimizer.get("optimizer", optimizer)
    state, groups = inner.get("state") or {}, inner.get("param_groups") or [{}]
    first = state.get(0, {}).get("step") if isinstance(state.get(0), dict) else None
    for value in (state.get("common_step"), first, groups[0].get("step")):
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            value = value.item()
        if isinstance(value, int | float) and value == int(value):
            return int(value)
    return None
