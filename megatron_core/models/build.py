"""From a configuration to this rank's stages of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatron_core.config import RunConfig
from megatron_core.models.complete import check_complete
from megatron_core.models.gpt import GPTModel
from megatron_core.parallel import ParallelGroups
from megatron_core.pipeline_parallel.actions import placed_round_robin
from megatron_core.pipeline_parallel.partition import layers_by_stage
from megatron_core.tensor_parallel import ModelParallelConfig


def build_stages(
    config: RunConfig,
    groups: ParallelGroups,
    vocab_size: int,
    device: torch.device,
    *,
    place: Sequence[int] | None = None,
    initialise: bool = True,
) -> tuple[list[range], dict[int, GPTModel]]:
    """The layers of every stage of the whole model, and this rank's stages by number.

    ``place[stage]`` is the pipeline rank of a stage, by default round robin. Without ``initialise`` the weights are
    left as they come, for a checkpoint to fill.
    """
    place = place or placed_round_robin(groups.size("pp"), config.parallel.num_chunks(config.model.num_layers))
    layers = layers_by_stage(config, vocab_size, len(place))
    parallel = ModelParallelConfig(
        sequence_parallel=config.parallel.sequence_parallel,
        params_dtype=getattr(torch, config.training.compute_dtype),
        tp_comm_overlap=config.parallel.tp_comm_overlap,
        perform_initialization=initialise,
        kernel_backend=config.model.kernel_backend,
        device=device,
    )
    stages: dict[int, GPTModel] = {}
    for stage, rank in enumerate(place):
        if rank != groups.index("pp"):
            continue
        last = stage == len(place) - 1
        stages[stage] = GPTModel(
            config.model,
            vocab_size,
            config.max_positions,
            parallel=parallel,
            layers=layers[stage],
            pre_process=stage == 0,
            post_process=last,
            tp_group=groups.group("tp"),
            seed=config.training.seed,
            tied_weight=_tied_weight(config, stages) if last and stage else None,
        )
    check_complete(stages, config.model.num_layers, groups, device)
    return layers, stages


def _tied_weight(config: RunConfig, stages: Mapping[int, GPTModel]) -> nn.Parameter | None:
    """The weight of the word embedding that the last stage scores with, if the first stage lies on this rank."""
    if not config.model.share_embeddings_and_output_weights or 0 not in stages:
        return None
    return stages[0].embedding.word_embeddings.weight
