"""Models whose layers have one part each: a Mamba-2 mixer, a gated delta net, attention, an MLP or experts."""

from copy import copy
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid.hybrid_layer_allocation import HybridStack
from megatron.core.transformer.layer_context import LayerPattern
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.spec_utils import get_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.features.fp8.settings import FP8Config
from megatron_core.features.recurrent.rules import recurrent_problems
from megatron_core.features.recurrent.settings import read_pattern
from megatron_core.features.sparse_attention.rules import sparse_attention_problems
from megatron_core.features.sparse_attention.settings import SparseAttentionConfig

_PASSED = (
    *("pre_process", "post_process", "fp16_lm_cross_entropy", "parallel_output", "rotary_percent", "rotary_base"),
    *("share_embeddings_and_output_weights", "position_embedding_type", "scatter_embedding_sequence_parallel"),
    *("seq_len_interpolation_factor", "pg_collection", "vp_stage"),
)
"""Arguments of ``HybridModel`` that are those of ``GPTModel``."""


class HybridModel(GPTModel):
    """The engine's model with ``--hybrid-layer-pattern``, under Megatron's arguments.

    ``hybrid_layer_pattern``, or its earlier name ``hybrid_override_pattern``, has one letter for each layer: M G * + D
    - E. Stages, separated by ``|``, become the ``pipeline_model_parallel_layout`` of ``config``. ``hybrid_stack_spec``
    is that of Megatron, because the parts follow from the pattern. Raises ConfigError for layers of multi-token
    prediction in the pattern, for ratios of layers, and for FP8 and muP; LayoutError for stages that the ranks cannot
    share.
    """

    def __init__(
        self,
        config: TransformerConfig,
        hybrid_stack_spec: Any,
        vocab_size: int,
        max_sequence_length: int,
        hybrid_layer_pattern: str | None = None,
        hybrid_attention_ratio: float | None = None,
        hybrid_mlp_ratio: float | None = None,
        hybrid_override_pattern: str | None = None,
        pre_process: bool = True,
        post_process: bool = True,
        fp16_lm_cross_entropy: bool = False,
        parallel_output: bool = True,
        share_embeddings_and_output_weights: bool = False,
        position_embedding_type: str = "none",
        rotary_percent: float = 1.0,
        rotary_base: float = 10000,
        scatter_embedding_sequence_parallel: bool = True,
        seq_len_interpolation_factor: float | None = None,
        pg_collection: Any = None,
        vp_stage: int | None = None,
    ) -> None:
        passed = {name: value for name, value in locals().items() if name in _PASSED}
        pattern = hybrid_layer_pattern or hybrid_override_pattern
        if get_module(hybrid_stack_spec) is not HybridStack or getattr(hybrid_stack_spec, "submodules", None):
            raise ConfigError("HybridModel: hybrid_stack_spec must be Megatron's; parts of its own are not supported")
        if not pattern or hybrid_attention_ratio or hybrid_mlp_ratio:
            raise ConfigError(
                f"HybridModel: hybrid_layer_pattern={pattern!r}, hybrid_attention_ratio={hybrid_attention_ratio}, "
                f"hybrid_mlp_ratio={hybrid_mlp_ratio}: give a pattern with one letter for each layer, and no ratios"
            )
        layers, config = _layers(pattern, config)
        own = config.model_config(
            hybrid_layer_pattern=layers.letters, mtp_layer_pattern=layers.ahead, **layers.settings
        )
        run = RunConfig(model=own, training=FP8Config(fp8_format=config.fp8))
        if problems := [*recurrent_problems(run, 1), *sparse_attention_problems(run, 1)]:
            raise ConfigError("; ".join(problems))
        super().__init__(config, layers, vocab_size, max_sequence_length, **passed)
        self.hybrid_layer_pattern = pattern

    def _whole_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return None for the causal mask, which Megatron-LM's loader makes: recurrences take no mask."""
        whole = super()._whole_mask(mask)
        if whole is None:
            return None
        causal = torch.ones(whole.shape[-2:], dtype=torch.bool, device=whole.device).triu(1)
        return None if bool((whole == causal).all()) else whole


def _layers(pattern: str, config: TransformerConfig) -> tuple[LayerPattern, TransformerConfig]:
    """Return the parts of each layer, and ``config`` or a copy with the layout of the pattern's stages."""
    letters, implied = read_pattern(pattern)
    found, ahead = LayerPattern(letters, implied.get("mtp_layer_pattern")), implied.get("mtp_num_layers")
    if ahead is not None and config.mtp_num_layers != ahead:
        raise ConfigError(
            f"HybridModel: hybrid_layer_pattern={pattern} has {ahead} layers of multi-token prediction (after /), but "
            f"config.mtp_num_layers={config.mtp_num_layers}; pass TransformerConfig(mtp_num_layers={ahead})"
        )
    if "multi_latent_attention" in implied and not config.multi_latent_attention:
        raise ConfigError(
            f"HybridModel: hybrid_layer_pattern={pattern} has layers + or D; pass an MLATransformerConfig"
        )
    if (variant := implied.get("experimental_attention_variant")) is not None:
        names = (each.name for each in fields(SparseAttentionConfig) if each.name.startswith("dsa_"))
        given = {name: getattr(config, name, None) for name in names}
        chosen = {name: value for name, value in given.items() if value is not None}
        found = replace(found, settings={"experimental_attention_variant": variant, **chosen})
    if (stages := implied.get("pipeline_model_parallel_layout")) is None:
        return found, config
    for name in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage"):
        if (value := getattr(config, name)) is not None:
            raise ConfigError(
                f"hybrid_layer_pattern={pattern} and {name}={value} assign layers to stages; leave one out"
            )
    layout = PipelineParallelLayerLayout(stages, config.pipeline_model_parallel_size)
    chunks = layout.virtual_pipeline_model_parallel_size
    if (config.virtual_pipeline_model_parallel_size or 1) != chunks:
        raise ConfigError(
            f"hybrid_layer_pattern={pattern} has {chunks} stages for each pipeline rank, but "
            f"virtual_pipeline_model_parallel_size={config.virtual_pipeline_model_parallel_size}; change one of them"
        )
    if config.pipeline_model_parallel_layout is None:
        config = copy(config)
        config.pipeline_model_parallel_layout = layout
    elif str(config.pipeline_model_parallel_layout) != stages:
        raise ConfigError(
            f"hybrid_layer_pattern={pattern} and pipeline_model_parallel_layout="
            f"{config.pipeline_model_parallel_layout} assign layers to stages; leave one of them out"
        )
    return found, config


class MambaModel(HybridModel):
    """The name of ``HybridModel`` in earlier releases, whose second argument is ``mamba_stack_spec``."""

    def __init__(self, config: TransformerConfig, mamba_stack_spec: Any, *args: Any, **settings: Any) -> None:
        super().__init__(config, mamba_stack_spec, *args, **settings)
