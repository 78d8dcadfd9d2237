"""The frozen teacher of a distillation: its weights, and its model in the layout of the run."""

from dataclasses import dataclass, fields, replace
from typing import Any

from megatron_core.checkpoint.reader import note
from megatron_core.config import DataConfig, ModelConfig, ParallelConfig, RunConfig
from megatron_core.config.validate import check
from megatron_core.errors import CheckpointError, ConfigError, MegatronError
from megatron_core.features.distillation.settings import DistillationConfig
from megatron_core.features.lora.settings import TuningConfig
from megatron_core.features.preferences.frozen import FrozenModel, load_frozen
from megatron_core.locations import location
from megatron_core.tokenizers import Tokenizer, tokenizer_of
from megatron_core.training.compatibility import model_settings, open_model
from megatron_core.training.setup import Run
from megatron_core.transformer.layer_spec import layer_spec
from megatron_core.vocabularies.compare import differing_tokens, names_its_tokens

OF_TRAINING = ("mtp_num_layers", "dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "dsa_indexer_warmup")
"""Settings of losses of other features, which the teacher does not have."""
OF_STAGES = (
    *("pipeline_model_parallel_layout", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers"),
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("num_layers_per_virtual_pipeline_stage", "pipeline_schedule", "pipeline_plan"),
)
"""Settings that assign the student's layers to stages, or order the actions of its training."""
OF_EXPERTS = "expert_model_parallel_size", "expert_tensor_parallel_size", "overlap_moe_expert_parallel_comm"
"""Settings that a teacher without experts does not have."""
SENTENCE_PIECE = "tokenizer.model"
"""The vocabulary in folders of Hugging Face without tokenizer.json."""
SHOWN = 3
"""Number of different tokens in a message."""


@dataclass(frozen=True)
class Teacher:
    """The configuration of the teacher's model in this run, and this rank's stages of it."""

    config: RunConfig
    model: FrozenModel


def build_teacher(run: Run) -> Teacher:
    """Build the teacher of ``--kd-teacher`` with its weights.

    Errors: ``CheckpointError`` if its tokens or length do not suit the run, ``ConfigError`` if its model cannot run in
    the layout.
    """
    config = run.config
    folder = run.config.section(DistillationConfig).kd_teacher
    assert folder is not None, "the run uses distillation"
    weights, stored = open_model(folder, device=run.world.device, name="kd_teacher")
    if (size := weights.state["vocab_size"]) != run.vocab_size:
        raise CheckpointError(
            f"kd_teacher={folder} has a vocabulary of {size} tokens, but this run has vocab_size={run.vocab_size}; "
            "distillation needs a teacher with the same tokens"
        )
    _check_tokens(folder, run.tokenizer, stored)
    if (longest := stored.max_positions) < config.data.seq_length:
        raise CheckpointError(
            f"kd_teacher={folder} has sequences of at most {longest} tokens, but this run has "
            f"seq_length={config.data.seq_length}; use at most --seq-length {longest}, or another teacher"
        )
    of_teacher = teacher_config(config, stored, len(run.plans.stage_to_rank))
    try:
        check(of_teacher, run.world.size)
    except ConfigError as error:
        raise ConfigError(f"the model of kd_teacher={folder} cannot run in this layout: {error}") from error
    return Teacher(of_teacher, load_frozen(run, of_teacher, layer_spec, weights))


def _check_tokens(folder: str, tokenizer: Tokenizer | None, stored: RunConfig) -> None:
    """``CheckpointError`` if an id is another token for the teacher: its distribution would be that of other texts."""
    of_teacher, reason = _tokenizer_of(folder, stored.data)
    if tokenizer is None or not names_its_tokens(tokenizer):
        reason = "this run has no texts of its ids"
    if tokenizer is None or of_teacher is None or reason:
        note(f"the tokens of kd_teacher={folder} are not compared with those of this run, because {reason}")
        return
    different = list(differing_tokens(tokenizer, of_teacher))
    if different:
        pairs = [f"{number} is {ours!r} in this run and {other!r} there" for number, ours, other in different[:SHOWN]]
        raise CheckpointError(
            f"kd_teacher={folder} has other tokens at {len(different)} ids: {'; '.join(pairs)}; distillation needs a "
            "teacher with the same tokens: give another teacher, or train with its tokenizer"
        )


def _tokenizer_of(folder: str, data: DataConfig) -> tuple[Tokenizer | None, str]:
    """The tokenizer of a teacher, or the reason why there is none."""
    missing = "its folder has no tokenizer"
    if data.tokenizer is None:
        model = location(folder) / SENTENCE_PIECE
        if not model.is_file():
            return None, missing
        data = replace(data, tokenizer_type="SentencePieceTokenizer", tokenizer_model=str(model))
    try:
        tokenizer = tokenizer_of(data)
    except MegatronError as error:
        return None, f"its tokenizer cannot be read: {error}"
    return (tokenizer, "") if names_its_tokens(tokenizer) else (None, missing)


def teacher_config(config: RunConfig, stored: RunConfig, num_stages: int) -> RunConfig:
    """Return ``config`` with the model of ``stored``, split by time over as many stages as the student's."""
    model = ModelConfig(**{name: getattr(stored.model, name) for name in model_settings()})
    model = replace(
        model,
        max_position_embeddings=stored.max_positions,
        make_vocab_size_divisible_by=config.model.make_vocab_size_divisible_by,
        kernel_backend=config.model.kernel_backend,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **{name: value for name, value in vars(ModelConfig()).items() if name in OF_TRAINING},
    )
    has_experts = stored.optional("num_experts") is not None
    if has_experts:
        of_experts: dict[str, Any] = {"moe_token_dispatcher_type": config.value("moe_token_dispatcher_type")}
        model = replace(model, **of_experts)
    chunks = num_stages // config.parallel.pipeline_model_parallel_size
    reset = OF_STAGES if has_experts else OF_STAGES + OF_EXPERTS
    changed: dict[str, Any] = {field.name: field.default for field in fields(ParallelConfig) if field.name in reset}
    changed |= {"num_virtual_stages_per_pipeline_rank": chunks if chunks > 1 else None}
    parallel = replace(config.parallel, **changed)
    config = replace(config, model=model, parallel=parallel)
    return config.with_section(DistillationConfig()).with_section(TuningConfig())
