"""Frozen models next to the trained one, such as the reference of preference optimization without adapters.

The reference is a second copy of the weights, in the layout of the trained model: split over tensor and pipeline ranks
as it is, and with ZeRO 3 sharded over data-parallel ranks. It takes 2 of 20 bytes for each parameter in bf16. Unlike
log-probabilities computed before training, it needs no pass over the data and nothing in checkpoints, and it uses the
kernels and micro-batches of the trained model: the first loss is log 2 to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_core.config import RunConfig
from megatron_core.data_parallel import BucketMemory, DataParallel, DataParallelSettings
from megatron_core.models import GPTModel
from megatron_core.models.build import build_stages
from megatron_core.models.megatron_lm import MegatronReader
from megatron_core.parallel import ParallelGroups
from megatron_core.training.state import held_weights
from megatron_core.training.tuning import Base, open_base
from megatron_core.transformer.layer_spec import LayerSpecs


@dataclass(frozen=True)
class Reference:
    """This rank's stages of a frozen model, by number, and the owner of their weights."""

    stages: dict[int, GPTModel]
    data_parallel: DataParallel


def build_reference(
    config: RunConfig,
    groups: ParallelGroups,
    vocab_size: int,
    device: torch.device,
    stage_to_rank: Sequence[int],
    layer_specs: LayerSpecs,
) -> Reference | None:
    """Build the reference of ``--dpo`` from --load-hf or --pretrained-checkpoint; None with adapters, or without
    preferences."""
    if not config.data.dpo or config.tuning.lora_rank is not None:
        return None
    base = open_base(config, device)
    assert base is not None, "the rules require the weights of the reference"
    return load_frozen(config, groups, vocab_size, device, stage_to_rank, layer_specs, base)


def load_frozen(
    config: RunConfig,
    groups: ParallelGroups,
    vocab_size: int,
    device: torch.device,
    stage_to_rank: Sequence[int],
    layer_specs: LayerSpecs,
    weights: Base | MegatronReader,
) -> Reference:
    """Build this rank's stages of the model of ``config`` without gradients, and fill them from ``weights``."""
    parallel = config.parallel
    shards = parallel.dp_zero_stage == 3
    _, stages = build_stages(
        config,
        groups,
        vocab_size,
        device,
        stage_to_rank=stage_to_rank,
        initialise=False,
        deferred=shards,
        layer_specs=layer_specs,
    )
    for stage in stages.values():
        stage.requires_grad_(False).eval()
    data = DataParallel(
        stages,
        groups,
        DataParallelSettings(
            zero_stage=3 if shards else 0,
            overlap_param_gather=shards and parallel.overlap_param_gather,
            bucket_size=parallel.ddp_bucket_size,
        ),
        memory=BucketMemory(device),
    )
    with weights:
        weights.fill(held_weights(data))
    return Reference(stages, data)
