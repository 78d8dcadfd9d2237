"""The requests of an engine: their pools, numbers and streams."""

import asyncio
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from megatron.core.inference.inference_request import InferenceRequest, Status
from megatron.core.inference.sampling_params import SamplingParams


class AsyncStream:
    """States of the request ``request_id``; ``cancel()`` is called if the reader stops early.

    ``put`` and ``finish`` may be called from another thread than that of ``loop``, by default the running loop.
    """

    def __init__(
        self, request_id: Any, cancel: Callable[[], Any], loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self.request_id, self._cancel = request_id, cancel
        self._loop = loop or asyncio.get_running_loop()
        self._queue = asyncio.Queue[Any]()
        self._finished = False

    def put(self, item: Any) -> None:
        """Add a state, or an exception that the reader raises."""
        if not self._finished:
            self._loop.call_soon_threadsafe(self._queue.put_nowait, item)

    def finish(self, exception: BaseException | type[BaseException] | None = None) -> None:
        """End the stream, with ``exception`` if given."""
        if not self._finished:
            self._finished = True
            last = exception if self._is_raisable(exception) else StopAsyncIteration
            self._loop.call_soon_threadsafe(self._queue.put_nowait, last)

    @property
    def finished(self) -> bool:
        """Whether the stream has ended."""
        return self._finished

    async def generator(self) -> AsyncGenerator[Any, None]:
        """Yield the states until the stream ends."""
        try:
            while True:
                item = await self._queue.get()
                if item is StopAsyncIteration:
                    return
                if self._is_raisable(item):
                    raise item
                yield item
        except GeneratorExit:
            self._cancel()
            raise asyncio.CancelledError from None

    @staticmethod
    def _is_raisable(value: Any) -> bool:
        return isinstance(value, BaseException) or (isinstance(value, type) and issubclass(value, BaseException))


class InferenceMode:
    """Whether an engine generates in this process."""

    _active: ClassVar[bool] = False

    @classmethod
    def is_active(cls) -> bool:
        """Return whether an engine generates."""
        return cls._active

    @classmethod
    def set_active(cls) -> None:
        """Record that an engine generates."""
        cls._active = True

    @classmethod
    def unset_active(cls) -> None:
        """Record that no engine generates."""
        cls._active = False

    @classmethod
    @contextmanager
    def active(cls) -> Iterator[None]:
        """A context in which an engine generates."""
        before, cls._active = cls._active, True
        try:
            yield
        finally:
            cls._active = before


class Counter:
    """Iterator of the numbers of requests."""

    def __init__(self, start: int = 0) -> None:
        self.counter = start

    def __next__(self) -> int:
        self.counter += 1
        return self.counter - 1

    def reset(self) -> None:
        """Continue with 0."""
        self.counter = 0


def get_attention_mask(seq_length: int) -> Tensor:
    """Return a causal mask ``[1, 1, s, s]``, True where a query must not see a key."""
    return torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool).triu(1)


def device_memory_summary() -> str:
    """Return the memory of this process's GPU in one line: allocated, in private pools, reserved, and used by all."""
    sizes = dict.fromkeys(("alloc", "private", "resv-alloc", "resv", "dev_mem"), 0)
    if torch.cuda.is_available():
        allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
        segments = [
            segment for segment in torch.cuda.memory_snapshot() if segment["device"] == torch.cuda.current_device()
        ]
        private = sum(segment["active_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))
        free, total = torch.cuda.mem_get_info()
        sizes = dict(zip(sizes, (allocated, private, reserved - allocated, reserved, total - free), strict=True))
    return " ".join(f"{name}={size / 2**20:.0f}MiB" for name, size in sizes.items())


class Scheduler:
    """Requests in the order of their arrival, at most ``max_batch_size`` of them active."""

    def __init__(self, max_batch_size: int) -> None:
        self.max_batch_size = max_batch_size
        self.requests = OrderedDict[int, InferenceRequest]()
        self.streams = OrderedDict[int, AsyncStream]()
        self.active_request_pool = OrderedDict[int, InferenceRequest]()
        self.waiting_request_pool = OrderedDict[int, InferenceRequest]()
        self.completed_request_pool = OrderedDict[int, InferenceRequest]()
        self.request_counter = Counter()

    def get_new_request_id(self) -> int:
        """Return an unused number of a request."""
        return next(self.request_counter)

    def add_request(
        self,
        prompt: str | None = None,
        prompt_tokens: Any = None,
        encoder_prompt: str | None = None,
        sampling_params: SamplingParams | None = None,
        arrival_time: float | None = None,
        streaming: bool = False,
        inference_request: InferenceRequest | None = None,
        *,
        inference_parameters: SamplingParams | None = None,
    ) -> int:
        """Add a request to the active or, if these are ``max_batch_size``, the waiting ones; return its number."""
        if inference_request is None:
            inference_request = InferenceRequest(
                request_id=self.get_new_request_id(),
                prompt=prompt or "",
                sampling_params=sampling_params or inference_parameters,
                prompt_tokens=prompt_tokens,
                encoder_prompt=encoder_prompt,
            )
        request = inference_request
        request.arrival_time = arrival_time or request.arrival_time or time.time()
        self.requests[request.request_id] = request
        if streaming:
            cancel = partial(self.abort_request, request.request_id)
            self.streams[request.request_id] = AsyncStream(request.request_id, cancel)
        if len(self.active_request_pool) < self.max_batch_size:
            self._activate(request)
        else:
            request.status = Status.WAITING_IN_QUEUE
            self.waiting_request_pool[request.request_id] = request
        return request.request_id

    def _activate(self, request: InferenceRequest) -> None:
        request.status = Status.ACTIVE_BUT_NOT_GENERATING_TOKENS
        self.active_request_pool[request.request_id] = request

    def num_requests_pending(self) -> int:
        """Return the number of active and waiting requests."""
        return len(self.active_request_pool) + len(self.waiting_request_pool)

    def have_requests_pending(self) -> bool:
        """Return whether there are active or waiting requests."""
        return self.num_requests_pending() > 0

    def add_earliest_waiting_request_to_active_pool(self) -> None:
        """Activate the request that has waited longest, if any."""
        assert len(self.active_request_pool) < self.max_batch_size, "the pool of active requests is full"
        if self.waiting_request_pool:
            self._activate(self.waiting_request_pool.popitem(last=False)[1])

    def update_requests_pools(self, result_dict: Mapping[int, InferenceRequest] | None = None) -> None:
        """Move the completed and failed requests of ``result_dict``, and activate as many waiting ones as fit."""
        for number in list(result_dict or ()):
            if self.active_request_pool[number].status in (Status.COMPLETED, Status.FAILED):
                self.completed_request_pool[number] = self.active_request_pool.pop(number)
        while self.waiting_request_pool and len(self.active_request_pool) < self.max_batch_size:
            self.add_earliest_waiting_request_to_active_pool()

    def abort_request(self, request_id: int, *, exception: BaseException | type[BaseException] | None = None) -> None:
        """End the stream of a request."""
        if request_id in self.streams:
            self.streams[request_id].finish(exception)
