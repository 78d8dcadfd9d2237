"""Rules for checkpoints in formats of other programs."""

from collections.abc import Iterator

from megatron_core.config.hybrid import BOTH, CONVOLUTION
from megatron_core.config.megatron_model import without_arguments
from megatron_core.config.model import ModelConfig
from megatron_core.config.run import RunConfig
from megatron_core.locations import path_of


def format_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings with which --ckpt-format cannot write checkpoints."""
    checkpoint = config.checkpoint
    if checkpoint.ckpt_format == "native" or checkpoint.save is None:
        return
    named = f"ckpt_format={checkpoint.ckpt_format}"
    if path_of(checkpoint.save) is None:
        yield f"{named} cannot be written to save={checkpoint.save}; give a local folder, or remove --ckpt-format"
    if checkpoint.ckpt_format == "torch_dist":
        for reason in unlike_megatron(config.model):
            yield f"{named} does not write {reason}; use torch_dcp, or remove --ckpt-format"
    if config.tuning.lora_rank is not None:
        yield f"{named} does not write low-rank adapters: lora_rank={config.tuning.lora_rank}; remove --ckpt-format"


def unlike_megatron(model: ModelConfig) -> Iterator[str]:
    """The settings of a model whose training cannot continue in Megatron-LM."""
    if model.experimental_attention_variant == "kimi_delta_attention":
        yield f"experimental_attention_variant={model.experimental_attention_variant}"
    for letter in (BOTH, CONVOLUTION):
        if letter in (model.hybrid_layer_pattern or ""):
            yield f"hybrid_layer_pattern={model.hybrid_layer_pattern}, whose layers {letter} Megatron Core lacks"
    if settings := without_arguments(model):
        yield f"{', '.join(settings)}, which Megatron-LM has no settings for"
