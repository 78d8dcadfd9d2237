"""The frozen teacher of a distillation: its weights, and its model in the layout of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from megatron_core.config import CheckpointConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_core.config.tuning import TuningConfig
from megatron_core.config.validate import check
from megatron_core.errors import CheckpointError, ConfigError
from megatron_core.models.megatron_lm import MegatronReader
from megatron_core.parallel import ParallelGroups, World
from megatron_core.training.compatibility import MODEL, open_model
from megatron_core.training.megatron_state import megatron_config, open_megatron
from megatron_core.training.reference import Reference, load_frozen
from megatron_core.training.tuning import Base
from megatron_core.transformer.layer_spec import layer_spec

OF_STAGES = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("num_layers_per_virtual_pipeline_stage", "pipeline_schedule", "pipeline_plan"),
)
"""Settings that assign the student's layers to stages, or order the actions of its training."""
OF_EXPERTS = "expert_model_parallel_size", "expert_tensor_parallel_size", "overlap_moe_expert_parallel_comm"
"""Settings that a teacher without experts does not have."""


@dataclass(frozen=True)
class Teacher:
    """The configuration of the teacher's model in this run, and this rank's stages of it."""

    config: RunConfig
    model: Reference


def build_teacher(
    config: RunConfig, groups: ParallelGroups, vocab_size: int, world: World, stage_to_rank: Sequence[int]
) -> Teacher | None:
    """Build the teacher of ``--kd-teacher`` with its weights; None without it, and in runs that do not train.

    Errors: ``CheckpointError`` if its vocabulary or length does not suit the run, ``ConfigError`` if its model cannot
    run in the layout.
    """
    if (folder := config.tuning.kd_teacher) is None or config.training.skip_train:
        return None
    weights, stored = open_teacher(folder, world.device)
    if (theirs := weights.state["vocab_size"]) != vocab_size:
        raise CheckpointError(
            f"kd_teacher={folder} has a vocabulary of {theirs} tokens, but this run has vocab_size={vocab_size}; "
            "distillation needs a teacher with the same tokens"
        )
    if (longest := stored.max_positions) < config.data.seq_length:
        raise CheckpointError(
            f"kd_teacher={folder} has sequences of at most {longest} tokens, but this run has "
            f"seq_length={config.data.seq_length}; use at most --seq-length {longest}, or another teacher"
        )
    own = teacher_config(config, stored, len(stage_to_rank))
    try:
        check(own, world.size)
    except ConfigError as error:
        raise ConfigError(f"the model of kd_teacher={folder} cannot run in this layout: {error}") from error
    return Teacher(own, load_frozen(own, groups, vocab_size, world.device, stage_to_rank, layer_spec, weights))


def open_teacher(folder: str, device: torch.device) -> tuple[Base | MegatronReader, RunConfig]:
    """Open a checkpoint of this project or of Megatron-LM, or a Hugging Face folder, and read its configuration.

    A collective call, with messages on ``device``.
    """
    theirs = open_megatron(CheckpointConfig(load=folder, finetune=True))
    if theirs is None:
        return open_model(folder, device=device, name="kd_teacher")
    return theirs, megatron_config(theirs.folder)


def teacher_config(config: RunConfig, stored: RunConfig, num_stages: int) -> RunConfig:
    """Return ``config`` with the model of ``stored``, split by time over as many stages as the student's."""
    model = ModelConfig(**{name: getattr(stored.model, name) for name in MODEL})
    model = replace(
        model,
        max_position_embeddings=stored.max_positions,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
        kernel_backend=config.model.kernel_backend,
        moe_token_dispatcher_type=config.model.moe_token_dispatcher_type,
        mtp_num_layers=None,
        dsa_indexer_loss_coeff=0.0,
        dsa_indexer_use_sparse_loss=False,
        dsa_indexer_warmup=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    chunks = num_stages // config.parallel.pipeline_model_parallel_size
    reset = OF_STAGES if model.num_experts is not None else OF_STAGES + OF_EXPERTS
    changed: dict[str, Any] = {each.name: each.default for each in fields(ParallelConfig) if each.name in reset}
    changed |= {"num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None}
    parallel = replace(config.parallel, **changed)
    return replace(config, model=model, parallel=parallel, tuning=TuningConfig())
