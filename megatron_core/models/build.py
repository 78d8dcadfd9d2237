"""From a configuration to this rank's stages of the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from megatron_core.config import RunConfig
from megatron_core.config.partition import layers_by_stage
from megatron_core.models.complete import check_complete
from megatron_core.models.gpt.model import GPTModel
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.groups import WHOLE_SEQUENCES
from megatron_core.schedules.actions import round_robin_stages
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.tensor_parallel.fp8 import FP8Precision
from megatron_core.transformer.layer_spec import LayerSpecs, layer_spec


def build_stages(
    config: RunConfig,
    groups: ParallelGroups,
    vocab_size: int,
    device: torch.device,
    *,
    stage_to_rank: Sequence[int] | None = None,
    initialise: bool = True,
    deferred: bool = False,
    context_parallel: bool = True,
    layer_specs: LayerSpecs = layer_spec,
) -> tuple[list[range], dict[int, GPTModel]]:
    """The layers of every stage of the whole model, and this rank's stages by number.

    ``stage_to_rank[stage]`` is the pipeline rank of a stage, by default round robin. Without ``initialise`` the
    weights are left as they come, for a checkpoint to fill. ``deferred`` leaves parameters on the meta device, for a
    rank that has no room for all of them: ``DataParallel`` makes and shards them one bucket after another. Without
    ``context_parallel`` every context-parallel rank is given whole sequences.
    """
    chunks = config.parallel.num_chunks(config.model.num_layers)
    stage_to_rank = stage_to_rank or round_robin_stages(groups.size("pp"), chunks)
    layers = layers_by_stage(config, vocab_size, len(stage_to_rank))
    sequence = groups.context if context_parallel else WHOLE_SEQUENCES
    fp8_layers = config.training.fp8_layers(config.model.num_layers)
    parallel = ModelParallelConfig(
        sequence_parallel=config.parallel.sequence_parallel,
        params_dtype=getattr(torch, config.training.compute_dtype),
        tp_comm_overlap=config.parallel.tp_comm_overlap,
        cp_comm_type=config.parallel.cp_comm_type,
        perform_initialization=initialise and not deferred,
        kernel_backend=config.model.kernel_backend,
        fp8_precision=FP8Precision(config.training, fp8_layers, sequence.whole) if fp8_layers else None,
        device=torch.device("meta") if deferred else device,
    )
    stages: dict[int, GPTModel] = {}
    for stage, rank in enumerate(stage_to_rank):
        if rank != groups.index("pp"):
            continue
        last = stage == len(stage_to_rank) - 1
        stages[stage] = GPTModel(
            config.model,
            vocab_size,
            config.max_positions,
            parallel=parallel,
            layers=layers[stage],
            pre_process=stage == 0,
            post_process=last,
            groups=groups,
            context_parallel=context_parallel,
            seed=config.training.seed,
            tied_weight=_tied_weight(config, stages) if last and stage else None,
            layer_specs=layer_specs,
        )
    check_complete(stages, config.model.num_layers, groups, device)
    return layers, stages


def _tied_weight(config: RunConfig, stages: Mapping[int, GPTModel]) -> nn.Parameter | None:
    """The weight of the word embedding that the last stage uses, if the first stage lies on this rank."""
    if not config.model.last_stage_embeds or 0 not in stages:
        return None
    embedding = stages[0].embedding
    assert embedding is not None, "the first stage has it"
    return embedding.word_embeddings.weight
