"""Server connections with time limits, so that slow clients cannot hold them open."""

import asyncio
import json
import time
from typing import Any

import h11
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 10.0
"""Time limit for the head of a request, from the opening of the connection or the first byte."""
WRITE_SECONDS = 30.0
"""Time limit for a client to read from a full output buffer."""


class BoundedConnection(H11Protocol):
    """A connection with time limits for heads and for unread answers.

    If more than ``most`` connections are open, the oldest one whose request is incomplete is closed; if there is none,
    the new connection gets status 503. Set ``most`` in a subclass (``bounded``).
    """

    most = 256

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._since = time.monotonic()
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start the time limit of a request's head; close a connection if there are too many."""
        super().connection_made(transport)
        self._limit_head()
        if len(self.connections) <= self.most:
            return
        open_connections = [c for c in self.connections if isinstance(c, BoundedConnection) and c is not self]
        incomplete = [connection for connection in open_connections if connection.is_incomplete]
        if incomplete:
            oldest = min(incomplete, key=lambda connection: connection._since)
            self.connections.discard(oldest)
            oldest.transport.abort()
        else:
            self.app = refuse

    @property
    def is_incomplete(self) -> bool:
        """Whether there is no complete request to answer."""
        return self.transport.is_closing() or self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

    def data_received(self, data: bytes) -> None:
        """Handle data; start or stop the time limit of the head."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_timer("head")
        elif "head" not in self._timers:
            self._since = time.monotonic()
            self._limit_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._stop_timer("head")
        self._stop_timer("write")
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """Start the time limit for the client to read."""
        super().pause_writing()
        self._timers["write"] = self.loop.call_later(WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """Stop the time limit: the client has read."""
        self._stop_timer("write")
        super().resume_writing()

    def _limit_head(self) -> None:
        self._timers["head"] = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop_timer(self, name: str) -> None:
        if name in self._timers:
            self._timers.pop(name).cancel()


def bounded(most: int) -> type[BoundedConnection]:
    """Create the connection class of a server with at most ``most`` connections."""
    return type("BoundedConnection", (BoundedConnection,), {"most": most})


async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with status 503."""
    error = {"message": "the server has too many connections; try again later", "type": "server_error"}
    body = json.dumps({"error": {**error, "param": None, "code": "too_many_connections"}}).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body)), "retry-after": "1"}
    pairs = [(name.encode(), value.encode()) for name, value in (headers | {"connection": "close"}).items()]
    await send({"type": "http.response.start", "status": 503, "headers": pairs})
    await send({"type": "http.response.body", "body": body})


async def received_body(request: Request, *, most: int, seconds: float) -> bytes:
    """Receive the body of a request of at most ``most`` bytes within ``seconds``; otherwise status 413 or 408."""
    received = bytearray()

    async def receive() -> None:
        async for chunk in request.stream():
            received.extend(chunk)
            if len(received) > most:
                raise HTTPException(413, f"the request has more than {most} bytes")

    try:
        await asyncio.wait_for(receive(), seconds)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the request did not arrive in {seconds:.0f} seconds") from None
    return bytes(received)
