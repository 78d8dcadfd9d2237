"""From a checkpoint and a layout to a generator and its tokenizer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from megatron_core import parallel_state
from megatron_core.checkpoint import CheckpointReader
from megatron_core.config import RunConfig
from megatron_core.config.parallel import BALANCED_STAGES
from megatron_core.config.rules_layout import parallel_problems
from megatron_core.errors import ConfigError
from megatron_core.inference.generator import Generator
from megatron_core.models.hf import HuggingFaceReader
from megatron_core.parallel import World, start_world
from megatron_core.tokenizers import Tokenizer, tokenizer_of


@dataclass(frozen=True, kw_only=True)
class GenerationLayout:
    """How the model is split for generation."""

    tensor_model_parallel_size: int = 1
    """Ranks over which the matrices of each layer are split."""
    pipeline_model_parallel_size: int = 1
    """Ranks over which the layers are split."""

    def applied(self, config: RunConfig) -> RunConfig:
        """The configuration of the training run in this layout."""
        balanced: dict[str, Any] = BALANCED_STAGES
        parallel = replace(
            config.parallel,
            **balanced,
            tensor_model_parallel_size=self.tensor_model_parallel_size,
            pipeline_model_parallel_size=self.pipeline_model_parallel_size,
            pipeline_schedule=None,
            pipeline_plan=None,
            context_parallel_size=1,
            expert_model_parallel_size=1,
            expert_tensor_parallel_size=None,
            sequence_parallel=False,  # one new position cannot be split
        )
        return replace(config, parallel=parallel)


def start_generator(
    reader: CheckpointReader | HuggingFaceReader,
    trained: RunConfig,
    layout: GenerationLayout,
    world: World,
    *,
    timeout_minutes: float = 10.0,
) -> tuple[Generator, Tokenizer]:
    """Join the ranks and load the model of ``reader``, which was trained as ``trained``; closes ``reader``.

    ``ConfigError`` if it has no tokenizer, or cannot be split in this layout.
    """
    with reader:
        config = layout.applied(trained)
        tokenizer = tokenizer_of(config.data)
        if tokenizer is None:
            raise ConfigError(f"{reader.folder} has no tokenizer, which the prompt needs; train with --tokenizer-type")
        found = list(parallel_problems(config, world.size))
        if found:
            raise ConfigError("\n".join(found))
        start_world(world, timeout_minutes=timeout_minutes)
        groups = parallel_state.make_groups(config.parallel, world)
        return Generator.load(reader, config, groups, world.device), tokenizer
