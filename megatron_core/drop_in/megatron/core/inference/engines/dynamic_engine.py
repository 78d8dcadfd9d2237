"""Requests that join and leave the batch between two steps, with Megatron Core's interface over the engine here."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from megatron.core.inference.contexts.dynamic_context import (
    BlockOverflowError,
    DynamicInferenceContext,
    MaxSequenceLengthOverflowError,
)
from megatron.core.inference.inference_request import DynamicInferenceRequest, DynamicInferenceRequestRecord, Status
from megatron.core.inference.sampling_params import SamplingParams
from megatron.core.inference.scheduler import Counter
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController
from megatron_core.drop_in.unsupported import unsupported
from megatron_core.errors import ConfigError
from megatron_core.inference.engine import Engine
from megatron_core.inference.requests import Progress, Request, TokenScore


class AbstractEngine(ABC):
    """Generates for prompts."""

    @abstractmethod
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Return the results of prompts."""


EngineState = Enum("EngineState", "RUNNING PAUSED SUSPENDED STOPPED")
"""State of an engine; the engine here is always running."""


class EngineSuspendedError(Exception):
    """The engine is suspended."""


@dataclass
class RequestEntry:
    """A request with the future of its result."""

    record: DynamicInferenceRequestRecord
    future: "asyncio.Future[DynamicInferenceRequestRecord]"
    latest: float
    """Time of the last token, in seconds of ``time.perf_counter``."""


class DynamicInferenceEngine(AbstractEngine):
    """Generates for all requests, at most ``max_requests`` of the context at a time.

    Every rank of a model calls the same methods. ``step_modern`` computes one step; the future of ``add_request`` has
    the record of a finished request. After a change of the weights, ``reset`` clears the cache of common prefixes.
    """

    def __init__(self, controller: TextGenerationController, context: DynamicInferenceContext, *args: Any) -> None:
        self.controller, self.context = controller, context
        self.request_counter = Counter()
        self.requests: dict[int, RequestEntry] = {}
        self.state, self.capture_stats = EngineState.RUNNING, None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.reset()

    def reset(self) -> None:
        """Remove all requests and the cache."""
        context, generator = self.context, self.controller.inference_wrapped_model.generator
        self._engine = Engine(
            generator,
            max_batch_size=context.max_requests,
            max_length=context.max_sequence_length,
            config=context.config.for_engine(),
        )
        allocator = context.kv_block_allocator
        allocator.total_count = allocator.active_count = self._engine.cache.capacity
        self.requests.clear()
        self._numbers: dict[int, int] = {}
        """The engine's number of a request -> its number here."""
        self._failed: list[DynamicInferenceRequestRecord] = []
        self.request_counter.reset()
        context.reset()

    def has_unfinished_requests(self) -> bool:
        """Return whether there are requests that no step has returned as finished."""
        return bool(self.requests or self._failed)

    def get_request(self, request_id: int) -> DynamicInferenceRequest:
        """Return an unfinished request."""
        return self.requests[request_id].record[-1]

    def add_request(
        self,
        request_id: int,
        prompt: str | Sequence[int] | Tensor,
        sampling_params: SamplingParams | None = None,
        **deprecated: Any,
    ) -> "asyncio.Future[DynamicInferenceRequestRecord]":
        """Add a request with a text or its tokens; a step adds it to the batch.

        A request that does not fit fails: its record has the status FAILED and the error as an event.
        """
        settings = sampling_params or deprecated.get("inference_parameters") or SamplingParams()
        controller, text = self.controller, prompt if isinstance(prompt, str) else None
        if text is not None:
            prompt = controller.tokenize_prompt(controller.tokenizer, text, settings.add_BOS)
        request = DynamicInferenceRequest(
            request_id=request_id,
            prompt=text,
            prompt_tokens=torch.as_tensor(prompt, dtype=torch.int64),
            sampling_params=settings,
            block_size_tokens=self.context.block_size_tokens,
            enable_prefix_caching=self.context.enable_prefix_caching,
        )
        return self.add(request)

    def add(self, request: DynamicInferenceRequest) -> "asyncio.Future[DynamicInferenceRequestRecord]":
        """Add a request; see ``add_request``."""
        if request.request_id in self.requests:
            raise ConfigError(f"request_id={request.request_id} is in use; give every request its own number")
        record = DynamicInferenceRequestRecord.from_request(request)
        entry = RequestEntry(record, self._event_loop().create_future(), time.perf_counter())
        self.requests[request.request_id] = entry
        request.add_event_add_engine()
        try:
            number = self._engine.submit(self._for_engine(request))
        except (ConfigError, MaxSequenceLengthOverflowError) as error:
            too_long = isinstance(error, MaxSequenceLengthOverflowError)
            request.add_event_error_nontransient(
                error if too_long else BlockOverflowError(request.request_id, str(error))
            )
            self._finish(entry, Status.FAILED)
            self._failed.append(record)
            return entry.future
        request.status = Status.ACTIVE_AND_GENERATING_TOKENS
        self._numbers[number] = request.request_id
        self.context.total_request_count = len(self.requests)
        return entry.future

    def _for_engine(self, request: DynamicInferenceRequest) -> Request:
        """Return the engine's request, and complete the settings of ``request``."""
        settings, tokens = request.sampling_params, request.prompt_tokens
        assert settings is not None and tokens is not None, "add_request has set both"
        seed = self.controller.next_seed()
        if settings.num_tokens_to_generate is not None and settings.num_tokens_total is not None:
            raise ConfigError("give num_tokens_to_generate or num_tokens_total, not both")
        if settings.top_n_logprobs and not settings.return_log_probs:
            raise ConfigError(f"top_n_logprobs={settings.top_n_logprobs} needs return_log_probs=True")
        total = settings.num_tokens_total or self.context.max_sequence_length
        room = self.context.max_sequence_length - len(tokens)
        number = total - len(tokens) if settings.num_tokens_to_generate is None else settings.num_tokens_to_generate
        if number < 0 or room < 0:
            raise MaxSequenceLengthOverflowError(request.request_id)
        settings.num_tokens_to_generate, settings.num_tokens_total = min(number, room), None
        if settings.termination_id is None:
            settings.termination_id = getattr(self.controller.tokenizer, "eod", -1)
        request.stop_word_ids = [
            self.controller.tokenize_prompt(self.controller.tokenizer, word) for word in settings.stop_words or ()
        ]
        scores = settings.return_log_probs and not settings.skip_prompt_log_probs
        return Request(
            prompt=tuple(tokens.tolist()),
            max_new_tokens=settings.num_tokens_to_generate,
            sampling=settings.for_engine(seed),
            ends=frozenset({settings.termination_id}),
            logprobs=settings.top_n_logprobs if settings.return_log_probs else None,
            score_prompt=scores and len(tokens) > 1,
        )

    def step_modern(self) -> dict[str, Any]:
        """Compute a step; return the numbers of the active requests and the records of the finished ones."""
        begin = time.perf_counter()
        finished, self._failed = self._failed, []
        for progress in self._engine.step() if self._engine.busy else ():
            entry = self.requests[self._numbers[progress.number]]
            if self._advance(entry, progress):
                del self._numbers[progress.number]
                finished.append(entry.record)
        self.context.step_count += 1
        self.context.total_request_count = len(self.requests)
        return {
            "active_request_ids": list(self.requests),
            "finished_request_records": finished,
            "step_time": time.perf_counter() - begin,
            "cuda_graph_request_count": None,
        }

    async def async_step(self) -> dict[str, Any]:
        """Compute a step, then let other tasks run; see ``step_modern``."""
        result = self.step_modern()
        await asyncio.sleep(0)
        return result

    def step_legacy(
        self, sampling_params: SamplingParams | None = None
    ) -> tuple[list[DynamicInferenceRequest], list[DynamicInferenceRequest], float]:
        """Compute a step; return active and finished requests and the time in seconds."""
        result = self.step_modern()
        active = [self.get_request(number) for number in result["active_request_ids"]]
        return active, [record.merge() for record in result["finished_request_records"]], result["step_time"]

    step = step_legacy

    def generate(
        self, prompts: Sequence[Any], sampling_params: SamplingParams | None = None
    ) -> list[DynamicInferenceRequestRecord]:
        """Return the records of ``prompts`` in their order."""
        for prompt in prompts:
            self.add_request(next(self.request_counter), prompt, sampling_params)
        records: list[DynamicInferenceRequestRecord] = []
        while self.has_unfinished_requests():
            records += self.step_modern()["finished_request_records"]
        return sorted(records, key=lambda record: record.request_id)

    def _advance(self, entry: RequestEntry, progress: Progress) -> bool:
        """Record a step's result in the request; return whether it is finished."""
        request, now = entry.record[-1], time.perf_counter()
        settings = request.sampling_params
        assert settings is not None, "add_request has set it"
        if not request.generated_tokens:
            request.add_event_add_context()
            request.ttft = now - entry.latest
            assert request.prompt_tokens is not None, "add_request has set it"
            self.context.lifetime_prefill_token_count += len(request.prompt_tokens)
            if settings.return_log_probs:
                self._score_prompt(request, progress.prompt_scores)
        if progress.token is not None:
            request.tpot.append(now - entry.latest)
            entry.latest = now
            request.generated_tokens.append(progress.token)
            if self.context.config.track_generated_token_events:
                request.add_event_generated_token(progress.token)
            if progress.score is not None:
                request.generated_log_probs.append(progress.score.logprob)
                if request.generated_top_n_logprobs is not None:
                    request.generated_top_n_logprobs.append(self._named(progress.score))
        tokens = request.generated_tokens
        stop_words = [word for word in request.stop_word_ids or () if word and tokens[-len(word) :] == word]
        stopped = len(stop_words[0]) if stop_words else 0
        if stopped and progress.finished is None:
            self._engine.cancel(progress.number)
        if progress.error is not None:
            request.add_event_error_nontransient(RuntimeError(progress.error))
        if progress.finished is None and not stopped:
            return False
        if stopped and not settings.detokenize_stop_sequence:
            for values in (request.generated_tokens, request.generated_log_probs, request.generated_top_n_logprobs):
                del (values or [])[-stopped:]
        self._finish(entry, Status.COMPLETED if progress.error is None else Status.FAILED)
        return True

    def _score_prompt(self, request: DynamicInferenceRequest, scores: Sequence[TokenScore]) -> None:
        """Begin the lists of log probabilities."""
        assert request.sampling_params is not None, "add_request has set it"
        named = request.sampling_params.top_n_logprobs > 0
        request.prompt_log_probs = [score.logprob for score in scores]
        request.prompt_top_n_logprobs = [self._named(score) for score in scores] if named else None
        request.generated_log_probs, request.generated_top_n_logprobs = [], [] if named else None

    def _named(self, score: TokenScore) -> dict[str, float]:
        """The most likely tokens as texts, with their log probabilities."""
        controller = self.controller
        return {
            controller.detokenize(controller.tokenizer, [token], remove_EOD=False, skip_special_tokens=False): value
            for token, value in score.alternatives
        }

    def _finish(self, entry: RequestEntry, status: Status) -> None:
        """Complete a request and its future."""
        request, controller = entry.record[-1], self.controller
        assert request.sampling_params is not None and request.event_add_engine is not None, "add has set both"
        request.status = status
        if status == Status.COMPLETED:
            request.add_event_finish()
        else:
            request.add_event_fail()
        ends = request.sampling_params.detokenize_stop_sequence
        request.generated_text = controller.detokenize(controller.tokenizer, request.generated_tokens, not ends)
        request.generated_length = len(request.generated_tokens)
        entry.record.latency = request.latency = time.time() - (request.event_add_engine.timestamp or 0.0)
        del self.requests[request.request_id]
        if not entry.future.done():
            entry.future.set_result(entry.record)

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        try:
            return asyncio.get_running_loop()
        except RuntimeError:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
            return self._loop

    start_listening_to_data_parallel_coordinator = unsupported(
        "a coordinator of data-parallel engines is not supported; call generate on every rank, or use megatron-serve"
    )
    suspend = resume = unsupported("an engine cannot be suspended; call reset to free its cache")
