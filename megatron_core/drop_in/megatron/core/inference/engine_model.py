"""A ``GPTModel`` as the engine's generator."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatron.core.transformer.foreign import ForeignAttention
from megatron_core.config import RunConfig
from megatron_core.config.training import TrainingConfig
from megatron_core.errors import ConfigError
from megatron_core.inference.generator import Generator
from megatron_core.inference.kv_cache import CachedSpan, KVCache
from megatron_core.models.gpt.model import GPTModel as EngineModel
from megatron_core.parallel.current import current

if TYPE_CHECKING:
    from megatron.core.inference.contexts import StaticInferenceContext
    from megatron.core.models.gpt import GPTModel

PRECISION = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float64: "fp64"}


class Stage(nn.Module):
    """The stage of a ``GPTModel`` with the arguments of the engine's model; logits are whole on every rank."""

    def __init__(self, model: GPTModel) -> None:
        super().__init__()
        self.model, self.decoder = model, model.decoder

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the engine's ``forward`` of the model."""
        model = self.model
        gathers, model._gathers = model._gathers, True
        try:
            return EngineModel.forward(model, *args, **kwargs)
        finally:
            model._gathers = gathers


def generator_of(model: GPTModel) -> Generator:
    """Return a generator over this rank's stage of ``model``. Errors: ``ConfigError`` for unsupported layouts."""
    groups, config = current(), model.config
    refused = {
        "sequence_parallel=True": config.sequence_parallel,
        f"context_parallel_size={groups.size('cp')}": groups.size("cp") > 1,
        f"expert_model_parallel_size={groups.size('ep')}": groups.size("ep") > 1,
        f"vp_stage={model.vp_stage}": model.vp_stage is not None,
        "fp8": config.fp8 is not None,
        "core_attention of your own": any(isinstance(module, ForeignAttention) for module in model.modules()),
    }
    if wrong := [name for name, value in refused.items() if value]:
        raise ConfigError(f"generation does not support {', '.join(wrong)}; build the model without")
    model.eval()
    parameter = next(model.parameters())
    precision = PRECISION.get(parameter.dtype)
    switch: dict[str, Any] = {} if precision is None else {precision: True}
    training = replace(TrainingConfig(), **switch)
    shape = replace(model.model_config, max_position_embeddings=model.max_sequence_length)
    run = RunConfig(model=shape, training=training)
    stages: Any = {groups.index("pp"): Stage(model)}
    return Generator(run, groups, stages, groups.size("pp"), model.vocab_size, parameter.device)


def forward_of_context(generator: Generator, context: StaticInferenceContext, tokens: Tensor) -> Tensor | None:
    """Run the next ``tokens`` ``[b, s]`` of every sequence of ``context``; see ``run_one_forward_step``."""
    batch, count = tokens.shape
    first = context.sequence_len_offset
    cache = context.engine_cache
    if first == 0 or cache is None:
        cache = KVCache(generator.device, context.max_sequence_length, context.max_batch_size)
        cache.reserve(batch)
        context.engine_cache = cache
    spans = [CachedSpan(first, count, [row]) for row in range(batch)]
    last = [row * count + count - 1 for row in range(batch)]
    wanted = last if context.materialize_only_last_token_logits else None
    logits, messages = generator.run(tokens.flatten().tolist(), spans, cache, wanted)
    for _, handle in messages:
        handle.wait()
    context.increment_sequence_len_offset(count)
    return None if logits is None else logits.view(batch, -1, logits.shape[-1])
