"""A stream of the states of a request, written by the engine and read by an asynchronous generator."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any


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
