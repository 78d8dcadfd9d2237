"""A model that generates, in one object."""

import asyncio
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest
from megatron.core.inference.model_inference_wrappers.abstract_model_inference_wrapper import GPTInferenceWrapper
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron_core.errors import ConfigError


class _Model:
    """A model with its tokenizer and engine.

    ``use_coordinator`` distributes requests over data-parallel engines and has an effect only in a job of several
    ranks, where it is refused: call ``generate`` on every rank with ``use_coordinator=False``.
    """

    def __init__(
        self,
        *,
        model: Any,
        tokenizer: Any,
        inference_config: InferenceConfig | None = None,
        use_coordinator: bool = True,
        coordinator_host: str | None = None,
        coordinator_port: int | None = None,
    ) -> None:
        if use_coordinator and dist.is_initialized() and dist.get_world_size() > 1:
            raise ConfigError(
                "use_coordinator=True is not supported in a job of several ranks; give use_coordinator=False and call "
                "generate on every rank, or start megatron-serve"
            )
        wrapper = GPTInferenceWrapper(model, DynamicInferenceContext(model.config, inference_config))
        self.controller = TextGenerationController(wrapper, tokenizer)
        self.engine = DynamicInferenceEngine(self.controller, self.context)

    @property
    def context(self) -> DynamicInferenceContext:
        """The sizes and counts of the engine."""
        context = self.controller.inference_wrapped_model.inference_context
        assert isinstance(context, DynamicInferenceContext), "the constructor has made it"
        return context

    @property
    def is_primary_rank(self) -> bool:
        """Whether this rank passes requests to the engine; all ranks do."""
        return True

    def _generate(self, prompts: Any, sampling_params: SamplingParams | None) -> list[DynamicInferenceRequest]:
        is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        records = self.engine.generate([prompts] if is_one else list(prompts), sampling_params or SamplingParams())
        return [record.merge() for record in records]


class MegatronLLM(_Model):
    """Generates for one prompt or several, a text or a list of tokens each."""

    def generate(
        self, prompts: str | Sequence[Any], sampling_params: SamplingParams | None = None
    ) -> list[DynamicInferenceRequest]:
        """Return the finished requests in the order of ``prompts``, also a list for one prompt."""
        return self._generate(prompts, sampling_params)

    def shutdown(self) -> None:
        """Free the engine's cache."""
        self.engine.reset()

    def __enter__(self) -> "MegatronLLM":
        return self

    def __exit__(self, *args: object) -> None:
        self.shutdown()


class MegatronAsyncLLM(_Model):
    """``MegatronLLM`` for asynchronous programs: other tasks run during a generation."""

    async def generate(self, prompts: str | Sequence[Any], sampling_params: SamplingParams | None = None) -> Any:
        """Return the finished requests in the order of ``prompts``; for one prompt, its request."""
        results = await asyncio.to_thread(self._generate, prompts, sampling_params)
        is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], int))
        return results[0] if is_one else results

    async def shutdown(self) -> None:
        """Free the engine's cache."""
        self.engine.reset()

    async def __aenter__(self) -> "MegatronAsyncLLM":
        return self

    async def __aexit__(self, *args: object) -> None:
        await self.shutdown()
