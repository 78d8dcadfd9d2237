"""From a configuration to this rank's stages of the model."""

from __future__ import annotations

import torch

from megatron_core.config import RunConfig
from megatron_core.models.gpt import GPTModel
from megatron_core.parallel import ParallelGroups
from megatron_core.pipeline_parallel.actions import placed_round_robin
from megatron_core.pipeline_parallel.partition import partition
from megatron_core.tensor_parallel import ModelParallelConfig


def build_stages(
    config: RunConfig,
    groups: ParallelGroups,
    vocab_size: int,
    device: torch.device,
    *,
    initialise: bool = True,
) -> tuple[list[range], dict[int, GPTModel]]:
    """The layers of every stage of the whole model, and this rank's stages by number.

    Without ``initialise`` the weights are left as they come, for a checkpoint to fill.
    """
    place = placed_round_robin(groups.size("pp"), config.parallel.num_chunks(config.model.num_layers))
    layers = partition(config.model.num_layers, len(place))
    parallel = ModelParallelConfig(
        sequence_parallel=config.parallel.sequence_parallel,
        params_dtype=getattr(torch, config.training.compute_dtype),
        tp_comm_overlap=config.parallel.tp_comm_overlap,
        perform_initialization=initialise,
        device=device,
    )
    stages = {
        stage: GPTModel(
            config.model,
            vocab_size,
            config.max_positions,
            parallel=parallel,
            layers=layers[stage],
            pre_process=stage == 0,
            post_process=stage == len(place) - 1,
            tp_group=groups.group("tp"),
            seed=config.training.seed,
        )
        for stage in range(len(place))
        if place[stage] == groups.index("pp")
    }
    return layers, stages
