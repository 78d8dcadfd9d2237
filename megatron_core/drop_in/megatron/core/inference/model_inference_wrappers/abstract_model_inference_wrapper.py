"""A model with its context of generation, as the engine's generator."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.inference.contexts.dynamic_context import BaseInferenceContext, StaticInferenceContext
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.foreign import ForeignAttention
from megatron.core.utils import get_model_config, unwrap_model
from megatron_core.config import RunConfig
from megatron_core.config.training import TrainingConfig
from megatron_core.errors import ConfigError
from megatron_core.inference.generator import Generator
from megatron_core.inference.kv_cache import CachedSpan, KVCache
from megatron_core.models.gpt.model import GPTModel as EngineModel
from megatron_core.parallel.current import current

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


class AbstractModelInferenceWrapper:
    """A model, on its own or as pipeline stages, with its context of generation.

    ``inference_wrapper_config`` and ``pg_collection`` are former arguments without effect.
    """

    def __init__(
        self,
        model: Any,
        inference_context: BaseInferenceContext | None = None,
        *args: Any,
        inference_wrapper_config: Any = None,
        pg_collection: Any = None,
    ) -> None:
        if isinstance(model, list):
            if len(model) != 1:
                raise ConfigError(f"the model has {len(model)} chunks; generation needs one chunk per pipeline stage")
            model = model[0]
        if inference_context is not None and not isinstance(inference_context, BaseInferenceContext):
            # The former order of the arguments: model, inference_wrapper_config, inference_context.
            inference_context = args[0] if args else None
        self.model, self.config = model, get_model_config(unwrap_model(model))
        self.inference_context = inference_context
        self._generator: Generator | None = None

    @property
    def gpt(self) -> GPTModel:
        """The model without its wrappers."""
        inner = unwrap_model(self.model)
        if not isinstance(inner, GPTModel):
            raise ConfigError(f"{type(inner).__name__} cannot generate; pass a GPTModel of megatron.core")
        return inner

    @property
    def generator(self) -> Generator:
        """The engine's view of the model."""
        if self._generator is None:
            self._generator = generator_of(self.gpt)
        return self._generator

    def prep_model_for_inference(self) -> None:
        """Put the model into evaluation mode and begin a batch."""
        self.model.eval()
        if isinstance(self.inference_context, StaticInferenceContext):
            self.inference_context.reset()

    def run_one_forward_step(self, inference_input: dict[str, Any]) -> Tensor | None:
        """Return logits ``[b, s, v]`` of the next tokens ``[b, s]`` of a static batch, whose keys and values are kept.

        With ``materialize_only_last_token_logits``, ``s`` of the result is 1. None on ranks without the last stage.
        """
        context = self.inference_context
        if not isinstance(context, StaticInferenceContext):
            raise ConfigError("run_one_forward_step needs a StaticInferenceContext; DynamicInferenceEngine has others")
        return forward_of_context(self.generator, context, inference_input["tokens"])

    __call__ = run_one_forward_step


class GPTInferenceWrapper(AbstractModelInferenceWrapper):
    """A GPT with its context of generation."""

    def prep_inference_input(self, prompts_tokens: Tensor) -> dict[str, Any]:
        """Return the inputs of whole prompts ``[b, s]``. Attention is causal; the mask is None."""
        positions = torch.arange(prompts_tokens.shape[1], device=prompts_tokens.device)
        return {
            "tokens": prompts_tokens,
            "attention_mask": None,
            "position_ids": positions[None].expand_as(prompts_tokens),
        }

    def get_batch_for_context_window(
        self, inference_input: dict[str, Any], context_start_position: int, context_end_position: int
    ) -> dict[str, Any]:
        """Return the inputs of the positions from ``context_start_position`` to before ``context_end_position``."""
        window = slice(context_start_position, context_end_position)
        return {
            "tokens": inference_input["tokens"][:, window],
            "position_ids": inference_input["position_ids"][:, window],
            "attention_mask": None,
        }


@dataclass
class InferenceWrapperConfig:
    """Settings that the model and its context have; they have no effect."""

    hidden_size: int
    params_dtype: Any
    inference_batch_times_seqlen_threshold: int
    padded_vocab_size: int
    inference_max_requests: int = 8
    inference_max_seq_length: int = 2560
    fp32_residual_connection: bool = False
    nccl_all_reduce_for_prefill: bool = False

    def add_attributes(self, attribute_value_pair: dict[str, Any]) -> None:
        """Set attributes, also ones that are not fields."""
        vars(self).update(attribute_value_pair)
