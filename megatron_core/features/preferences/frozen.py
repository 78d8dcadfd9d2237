"""Frozen models next to the trained one: the reference of preferences, and the teacher of a distillation.

A frozen model has the layout of the trained model: it is split over tensor and pipeline ranks as that is, and with ZeRO
3 sharded over data-parallel ranks. A copy takes 2 of 20 bytes for each parameter in bf16. Unlike values computed before
training, it needs no pass over the data and nothing in checkpoints, and it uses the kernels and micro-batches of the
trained model: the first loss of preferences is log 2 to the last bit.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_core.checkpoint import TensorBox
from megatron_core.config import RunConfig
from megatron_core.data_parallel import BucketMemory, DataParallel, DataParallelSettings
from megatron_core.models import GPTModel
from megatron_core.models.build import build_stages
from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.training.driver import PipelineRank, run_plan
from megatron_core.training.setup import Run
from megatron_core.training.state import held_weights
from megatron_core.training.step import message_lengths, model_step
from megatron_core.transformer.layer_spec import LayerSpecs


class StoredWeights(AbstractContextManager[Any], Protocol):
    """A checkpoint of any format that is open for reading."""

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the stored values into the memory of every piece."""


@dataclass(frozen=True)
class FrozenModel:
    """This rank's stages of a frozen model, by number, and the owner of their weights."""

    stages: dict[int, GPTModel]
    data_parallel: DataParallel


def load_frozen(run: Run, config: RunConfig, layer_specs: LayerSpecs, weights: StoredWeights) -> FrozenModel:
    """Build this rank's stages of the model of ``config`` in the layout of ``run`` without gradients, and fill them
    from ``weights``."""
    parallel = config.parallel
    shards = parallel.dp_zero_stage == 3
    _, stages = build_stages(
        config,
        run.groups,
        run.vocab_size,
        run.world.device,
        stage_to_rank=run.plans.stage_to_rank,
        initialise=False,
        deferred=shards,
        layer_specs=layer_specs,
    )
    for stage in stages.values():
        stage.requires_grad_(False).eval()
    data = DataParallel(
        stages,
        run.groups,
        DataParallelSettings(
            zero_stage=3 if shards else 0,
            overlap_param_gather=shards and parallel.overlap_param_gather,
            bucket_size=parallel.ddp_bucket_size,
        ),
        memory=BucketMemory(run.world.device),
    )
    with weights:
        weights.fill(held_weights(data))
    return FrozenModel(stages, data)


@torch.no_grad()
def last_outputs(
    run: Run,
    stages: Mapping[int, GPTModel],
    batches: Sequence[MicroBatch],
    convert: Callable[[int, Tensor], Tensor],
    pipeline: PipelineRank | None = None,
    **options: Any,
) -> dict[int, Tensor]:
    """Compute ``stages`` without gradients and dropout; return ``convert(number, output)`` of each micro-batch.

    Empty without the last stage. ``pipeline``: with messages of another model; ``options``: see ``model_step``.
    """
    by_micro_batch: dict[int, Tensor] = {}
    final = len(run.layers) - 1
    modes = [stage.training for stage in stages.values()]
    compute = model_step(run, stages, batches, None, **options)

    def keep(stage: int, micro: int, hidden: Tensor | None) -> Tensor:
        output = compute(stage, micro, hidden)
        if stage < final:
            return output
        by_micro_batch[micro] = convert(micro, output)
        return output.new_zeros(())

    for stage in stages.values():
        stage.eval()
    run_plan(pipeline or run, run.plans.evaluation(len(batches)), keep, lengths=message_lengths(batches))
    for stage, mode in zip(stages.values(), modes, strict=True):
        stage.train(mode)
    return by_micro_batch
