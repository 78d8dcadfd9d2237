"""Batches of requests that start together, with Megatron Core's interface."""

import asyncio
import warnings
from collections.abc import AsyncGenerator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import torch

from megatron.core.inference.config import InferenceConfig
from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext, StaticInferenceContext
from megatron.core.inference.engines.dynamic_engine import AbstractEngine, DynamicInferenceEngine
from megatron.core.inference.inference_request import DynamicInferenceRequest, InferenceRequest, Status
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.scheduler import Scheduler
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron_core.errors import ConfigError


class StaticInferenceEngine(AbstractEngine):
    """Generates for the requests of its scheduler, at most ``max_batch_size`` at a time.

    ``legacy`` has no effect: the same engine computes all requests. ``buffer_size_gb`` limits the memory of keys and
    values; None: half of the free memory.
    """

    def __init__(
        self,
        text_generation_controller: TextGenerationController,
        max_batch_size: int | None = None,
        random_seed: int | None = None,
        legacy: bool = False,
        buffer_size_gb: float | None = 40,
    ) -> None:
        self.controller, self.legacy, self.random_seed = text_generation_controller, legacy, random_seed or 1234
        self.inference_wrapped_model = self.controller.inference_wrapped_model
        self.config = self.inference_wrapped_model.config
        self.context = context = self.inference_wrapped_model.inference_context
        if not isinstance(context, StaticInferenceContext):
            raise ConfigError("StaticInferenceEngine needs a model wrapped with a StaticInferenceContext")
        most = context.max_batch_size
        if max_batch_size is not None and max_batch_size > most:
            warnings.warn(f"max_batch_size={max_batch_size} is limited to {most} by the context", stacklevel=2)
        self.max_batch_size = min(max_batch_size or most, most)
        self.scheduler = Scheduler(self.max_batch_size)
        if random_seed is not None:
            self.controller.sampling_rng.manual_seed(random_seed)
        settings = InferenceConfig(
            max_sequence_length=context.max_sequence_length,
            max_requests=self.max_batch_size,
            buffer_size_gb=buffer_size_gb or 40,
            materialize_only_last_token_logits=False,
        )
        self.dynamic_engine = DynamicInferenceEngine(self.controller, DynamicInferenceContext(self.config, settings))

    def get_new_request_id(self) -> int:
        """Return an unused number of a request."""
        return self.scheduler.get_new_request_id()

    def add_request(
        self,
        prompt: str | None = None,
        add_BOS: bool = False,
        encoder_prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        streaming: bool = False,
        inference_request: InferenceRequest | None = None,
        *,
        inference_parameters: SamplingParams | None = None,
    ) -> int:
        """Queue a prompt or a request; return its number. ``streaming`` needs a running event loop."""
        if prompt is None and inference_request is None:
            raise ConfigError("add_request needs a prompt or an inference_request")
        if encoder_prompt is not None:
            raise ConfigError("encoder_prompt is not supported: models here have no encoder; remove it")
        tokens = None
        if inference_request is None:
            tokens = self.controller.tokenize_prompt(self.controller.tokenizer, prompt or "", add_BOS)
        return self.scheduler.add_request(
            prompt=prompt,
            prompt_tokens=tokens,
            sampling_params=sampling_params or inference_parameters,
            streaming=streaming,
            inference_request=inference_request,
        )

    def get_stream_generator(self, request_id: int) -> AsyncGenerator[InferenceRequest, None] | None:
        """Return the states of a request after each token, or None if it is not streamed."""
        stream = self.scheduler.streams.get(request_id)
        return None if stream is None else stream.generator()

    def generate(
        self,
        prompts: Sequence[str] | None = None,
        add_BOS: bool = False,
        encoder_prompts: Sequence[str] | None = None,
        common_inference_params: SamplingParams | None = None,
        sampling_params: SamplingParams | None = None,
        inference_requests: Sequence[InferenceRequest] | None = None,
    ) -> list[InferenceRequest]:
        """Return the requests of ``prompts``, or ``inference_requests``, in their order.

        The ``status`` of a request that does not fit the context is FAILED; the others are not affected.
        """
        if encoder_prompts is not None:
            raise ConfigError("encoder_prompts is not supported: models here have no encoder; remove it")
        if (prompts is None) == (inference_requests is None):
            raise ConfigError("generate needs either prompts or inference_requests")
        settings = sampling_params or common_inference_params or SamplingParams(num_tokens_to_generate=30)
        if inference_requests is None:
            numbers = [self.add_request(prompt, add_BOS, sampling_params=settings) for prompt in prompts or ()]
        else:
            numbers = [self.add_request(inference_request=request) for request in inference_requests]
        self.run_engine()
        return [self.scheduler.completed_request_pool[number] for number in numbers]

    def run_engine(self) -> None:
        """Generate until no request is left."""
        while self.scheduler.have_requests_pending():
            active = dict(self.scheduler.active_request_pool)
            for request in active.values():
                self._start(request)
            while self.dynamic_engine.has_unfinished_requests():
                records = self.dynamic_engine.step_modern()["finished_request_records"]
                for number in self.dynamic_engine.requests:
                    self._publish(active[number], self.dynamic_engine.get_request(number))
                for record in records:
                    state = record.merge()
                    self._publish(active[record.request_id], state)
                    self._complete(active[record.request_id], state)
            self.scheduler.update_requests_pools(active)

    async def run_engine_async(self) -> None:
        """Generate in another thread until no request is left, so that readers of streams run meanwhile."""
        await asyncio.to_thread(self.run_engine)

    def _start(self, request: InferenceRequest) -> None:
        settings = request.sampling_params or SamplingParams(num_tokens_to_generate=30)
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS
        self.dynamic_engine.add(
            DynamicInferenceRequest(
                request_id=request.request_id,
                prompt=request.prompt,
                prompt_tokens=torch.tensor(list(request.prompt_tokens), dtype=torch.int64),
                sampling_params=settings,
            )
        )

    def _publish(self, request: InferenceRequest, state: DynamicInferenceRequest) -> None:
        """Add the state after a new token to the stream of a request."""
        stream = self.scheduler.streams.get(request.request_id)
        if stream is not None and len(state.generated_tokens) > (request.generated_length or 0):
            self._copy(request, state)
            stream.put(replace(request, generated_log_probs=copy(request.generated_log_probs)))

    def _copy(self, request: InferenceRequest, state: DynamicInferenceRequest) -> None:
        controller = self.controller
        request.generated_tokens = torch.tensor(state.generated_tokens, dtype=torch.int64)
        request.generated_length = len(state.generated_tokens)
        request.generated_sequence_lengths = [request.generated_length]
        request.prompt_log_probs, request.generated_log_probs = state.prompt_log_probs, state.generated_log_probs
        request.prompt_top_n_logprobs = state.prompt_top_n_logprobs
        request.generated_top_n_logprobs, request.tpot = state.generated_top_n_logprobs, list(state.tpot)
        request.generated_text = controller.detokenize(controller.tokenizer, state.generated_tokens)

    def _complete(self, request: InferenceRequest, state: DynamicInferenceRequest) -> None:
        self._copy(request, state)
        request.status, request.generated_text = state.status, state.generated_text
        errors = [event.payload for event in state.events if isinstance(event.payload, Exception)]
        if errors:
            warnings.warn(f"failed: {errors[0]}", stacklevel=2)
        if request.sampling_params is not None and request.sampling_params.return_segments:
            request.segments = self._texts(list(request.prompt_tokens) + state.generated_tokens)
            request.generated_segments = self._texts(state.generated_tokens)
        stream = self.scheduler.streams.get(request.request_id)
        if stream is not None:
            stream.finish()

    def _texts(self, tokens: list[int]) -> list[str]:
        controller = self.controller
        return [controller.detokenize(controller.tokenizer, [token], remove_EOD=False) for token in tokens]
