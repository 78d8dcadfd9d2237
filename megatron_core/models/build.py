"""Build this rank's stages of the model, and check that the stages of all ranks make up the whole model."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from megatron_core.config import RunConfig
from megatron_core.config.partition import layers_by_stage
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.feature import load_hook, used_features
from megatron_core.models.gpt.model import GPTModel
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.groups import WHOLE_SEQUENCES, Group, LocalGroup
from megatron_core.parallel.sharding import spec_of
from megatron_core.parallel.texts import gather_strings, listed
from megatron_core.schedules.actions import round_robin_stages
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.tensor_parallel.arithmetic import PLAIN, LayerArithmetic
from megatron_core.transformer.layer_spec import LayerSpecs, layer_spec


def meta_model(config: RunConfig, vocab_size: int) -> GPTModel:
    """The whole model of a run, on the meta device of one rank."""
    # Shapes and names without memory: a planner describes models that no machine holds.
    parallel = ModelParallelConfig(perform_initialization=False, device="meta")
    groups = ParallelGroups.single()
    model = GPTModel(config.model, vocab_size, config.longest_text, parallel=parallel, groups=groups)
    _change(config, model, groups, initialise=False)
    return model


def global_shapes(config: RunConfig, vocab_size: int) -> dict[str, tuple[int, ...]]:
    """The global shapes of the model's parameters by name."""
    named = meta_model(config, vocab_size).named_global_parameters()
    return {name: spec_of(parameter).global_shape for name, parameter in named}


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
    weights are uninitialized memory for a checkpoint to fill. ``deferred`` leaves parameters on the meta device, for a
    rank without memory for all of them: ``DataParallel`` allocates and shards them one bucket at a time. Without
    ``context_parallel`` every context-parallel rank receives whole sequences.
    """
    # The layers and the rank of each stage.
    chunks = config.parallel.num_chunks(config.model.num_layers)
    stage_to_rank = stage_to_rank or round_robin_stages(groups.size("pp"), chunks)
    layers = layers_by_stage(config, vocab_size, len(stage_to_rank))

    # The settings of parallel layers.
    sequence = groups.context if context_parallel else WHOLE_SEQUENCES
    parallel = ModelParallelConfig(
        sequence_parallel=config.parallel.sequence_parallel,
        params_dtype=getattr(torch, config.training.compute_dtype),
        tp_comm_overlap=config.parallel.tp_comm_overlap,
        tp_comm_overlap_chunks=config.parallel.tp_comm_overlap_chunks,
        cp_comm_type=config.optional("cp_comm_type"),
        perform_initialization=initialise and not deferred,
        kernel_backend=config.model.kernel_backend,
        device=torch.device("meta") if deferred else device,
        arithmetic=arithmetic_of(config, sequence.whole, groups.size("dp")),
    )

    # This rank's stages.
    stages: dict[int, GPTModel] = {}
    for stage, rank in enumerate(stage_to_rank):
        # Only this rank's stages are built, so that no rank needs memory for the whole model.
        if rank != groups.index("pp"):
            continue
        is_last = stage == len(stage_to_rank) - 1
        stages[stage] = GPTModel(
            config.model,
            vocab_size,
            config.longest_text,
            parallel=parallel,
            layers=layers[stage],
            pre_process=stage == 0,
            post_process=is_last,
            groups=groups,
            context_parallel=context_parallel,
            seed=config.training.seed,
            tied_weight=_tied_weight(config, stages) if is_last and stage else None,
            layer_specs=layer_specs,
        )
        _change(config, stages[stage], groups, initialise=parallel.perform_initialization)
    # Ranks with other flags or another code would otherwise train a model with a layer missing or twice.
    check_complete(stages, config.model.num_layers, groups, device)
    return layers, stages


def _change(config: RunConfig, model: GPTModel, groups: ParallelGroups, *, initialise: bool) -> None:
    """Freeze parameters of a stage, or add parts to it, as the features of the run need."""
    for hook in (feature.change_stage for feature in used_features(config)):
        if hook is not None:
            load_hook(hook)(config, model, groups, initialise=initialise)


def arithmetic_of(config: RunConfig, context: Group, data_ranks: int) -> LayerArithmetic:
    """The products and sums of the layers; the ranks of ``context`` have parts of each sequence."""
    hooks = {feature.name: feature.arithmetic for feature in used_features(config) if feature.arithmetic is not None}
    # Two orders of summation contradict one another.
    if len(hooks) > 1:
        raise ConfigError(f"only one feature can replace the arithmetic of layers, not {' and '.join(hooks)}; use one")
    arithmetic = PLAIN
    for hook in hooks.values():
        arithmetic = load_hook(hook)(config, context, data_ranks)
    return arithmetic


def _tied_weight(config: RunConfig, stages: Mapping[int, GPTModel]) -> nn.Parameter | None:
    """The weight of the word embedding for the last stage, if the first stage is on this rank."""
    if not config.model.last_stage_embeds or 0 not in stages:
        return None
    embedding = stages[0].embedding
    assert embedding is not None, "the first stage has an embedding"
    return embedding.word_embeddings.weight


EMBEDDING = "the embedding"
OUTPUT = "the output layer"


def check_complete(
    stages: Mapping[int, GPTModel], num_layers: int, groups: ParallelGroups, device: torch.device
) -> None:
    """Compare the parts on all ranks of the pipeline with the parts of the model; a collective call.

    Errors: ``LayoutError``, the same on all ranks, if a part of the model is on no rank or on two.
    """
    pipeline = groups.group("pp")
    if isinstance(pipeline, LocalGroup) and pipeline.size() > 1:
        return  # one rank of a pipeline that is only planned: there are no others to compare with
    local_parts = "\n".join(name for model in stages.values() for name in model_parts_of(model))
    parts_by_rank = [text.splitlines() for text in gather_strings(local_parts, pipeline, device)]
    problems = faults(parts_by_rank, num_layers)
    if problems:
        raise LayoutError(
            f"pipeline ranks {listed(groups.ranks('pp'))} do not make up one whole model: {'; '.join(problems)}. "
            "Give all ranks the same flags and the same code, and check pipeline_model_parallel_layout"
        )


def model_parts_of(model: GPTModel) -> list[str]:
    """The names of the parts of the model in a stage."""
    names = [EMBEDDING] * (model.embedding is not None) + [f"layer {number}" for number in model.decoder.layers.keys()]  # noqa: SIM118
    return names + [OUTPUT] * (model.output_layer is not None)


def faults(parts_by_rank: Sequence[Iterable[str]], num_layers: int) -> list[str]:
    """Messages about missing, duplicate and unknown parts, given the parts on each pipeline rank."""
    holders: dict[str, list[int]] = {}
    for rank, names in enumerate(parts_by_rank):
        for name in names:
            holders.setdefault(name, []).append(rank)
    wanted = [EMBEDDING, *(f"layer {number}" for number in range(num_layers)), OUTPUT]
    missing = [name for name in wanted if name not in holders]
    problems = [f"{listed(missing)} on no rank"] if missing else []
    for name, ranks in holders.items():
        if name not in wanted:
            problems.append(f"{name} on pipeline rank {ranks[0]}, but num_layers={num_layers}")
        elif len(ranks) > 1:
            problems.append(f"{name} on pipeline ranks {' and '.join(map(str, ranks))}")
    return problems
