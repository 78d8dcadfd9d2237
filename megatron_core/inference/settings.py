"""Settings of the layout, of the key-value cache and of the steps of generation, with Megatron-LM's names."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, declarations, section, setting
from megatron_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
@section()
class InferenceConfig:
    """Settings of megatron-serve and megatron-generate; training does not read them."""

    inference_dynamic_batching_block_size: int = setting(32, r.SMALL_COUNT, when=ALWAYS)
    """Positions in a block of the key-value cache; texts share full blocks of a common prefix."""
    inference_dynamic_batching_buffer_size_gb: float | None = setting(None, r.POSITIVE, when=ALWAYS)
    """Largest memory of the key-value cache on each rank, in GB (1e9 bytes); memory is allocated as texts grow, and
    returned. If it is full, the text that came last waits. States of recurrent layers, whose size does not grow with a
    text, are in addition to it. Default: half of the free memory at the start."""
    inference_dynamic_batching_max_tokens: int = setting(512, r.SIZE, when=ALWAYS)
    """Tokens of a step. A longer prompt is computed in chunks, between which running texts get their next tokens: a
    smaller number delays them less, a larger one computes prompts faster. A step has at least one block of prompts."""
    enable_chunked_prefill: bool = setting(True, when=ALWAYS)
    """Divide long prompts into chunks; --no-enable-chunked-prefill: running texts wait for a whole prompt."""
    inference_dynamic_batching_prefix_caching: bool = setting(True, when=ALWAYS)
    """Compute a prefix that is common to several texts once; --no-inference-dynamic-batching-prefix-caching, and models
    with recurrent layers: for each text."""

    def __post_init__(self) -> None:
        for name, declared in declarations(InferenceConfig):
            value = getattr(self, name)
            legal = declared.legal
            if legal is not None and value is not None and not legal.contains(value):
                raise ConfigError(f"{name}={value} {legal.fault}: it must be {legal.words}")


@dataclass(frozen=True, kw_only=True)
class GenerationLayout:
    """Layout of the model for generation."""

    tensor_model_parallel_size: int = 1
    """Number of ranks over which the matrices of each layer are split."""
    pipeline_model_parallel_size: int = 1
    """Number of ranks over which the layers are split."""
    layout_invariant: bool = False
    """Compute logits and log probabilities with the bits of a training with --layout-invariant, in every layout and
    independent of the other texts of a step. Each step takes longer, because its products have fixed shapes."""

    def applied(self, config: RunConfig) -> RunConfig:
        """Return the configuration of the training run with this layout."""
        balanced: Mapping[str, Any] = config.parallel.stage_defaults()
        parallel = replace(
            config.parallel,
            **balanced,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            context_parallel_size=1,
            expert_model_parallel_size=1,
            expert_tensor_parallel_size=None,
            layout_invariant=self.layout_invariant,
            sequence_parallel=False,  # a single new position cannot be split
        )
        return replace(config, parallel=parallel)
