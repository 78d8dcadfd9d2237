"""Deliberately slow clients: a real uvicorn in a thread with its own application."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from typing import Any

import pytest
import uvicorn

from megatron_core.inference import connections
from megatron_core.inference.connections import bounded

MOST = 8


class App:
    """``/`` answers, ``/wait`` answers when ``go`` is set, ``/flood`` sends 64 MB."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.floods_ended = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while scope["path"] == "/wait" and not self.go.is_set():
            await asyncio.sleep(0.01)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/flood":
            for _ in range(1000):
                await send({"type": "http.response.body", "body": b"x" * 64000, "more_body": True})
            self.floods_ended += 1
        await send({"type": "http.response.body", "body": b"ok"})


@pytest.fixture
def app() -> App:
    return App()


@pytest.fixture
def port(app: App, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.4)
    monkeypatch.setattr(connections, "WRITE_SECONDS", 0.4)
    listening = socket.create_server(("127.0.0.1", 0))
    settings: dict[str, Any] = {"http": bounded(MOST), "lifespan": "off", "log_level": "error"}
    server = uvicorn.Server(uvicorn.Config(app, timeout_graceful_shutdown=1, **settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    app.go.set()
    thread.join(timeout=20)
    assert not thread.is_alive()


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def get(port: int, path: str = "/") -> tuple[int, dict[str, str], bytes]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path)
    answer = connection.getresponse()
    found = answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    connection.close()
    return found


def seconds_until_closed(connection: socket.socket, sent: bytes) -> float:
    """Send ``sent`` byte by byte until the server closes the connection."""
    start = time.monotonic()
    for byte in sent:
        try:
            connection.sendall(bytes([byte]))
            connection.settimeout(0.1)
            if not connection.recv(1000):
                break
        except TimeoutError:
            continue
        except OSError:
            break
    return time.monotonic() - start


SLOW = b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: " + b"x" * 100


def test_a_slow_head_is_closed(port: int) -> None:
    with connect(port) as connection:
        assert 0.2 < seconds_until_closed(connection, SLOW) < 5.0


def test_a_slow_head_after_a_request_is_closed(port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        assert seconds_until_closed(connection, SLOW) < 5.0


def test_incomplete_requests_make_room(port: int) -> None:
    """Many connections that send nothing, half a head or half a body do not block others."""
    begun = (b"", b"GET / HTTP/1.1\r\nHo", b"POST /wait HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx")
    held = [connect(port) for _ in range(4 * MOST)]
    for number, connection in enumerate(held):
        connection.sendall(begun[number % 3])
    assert [get(port)[0] for _ in range(3)] == [200] * 3
    for connection in held:
        connection.close()


def test_too_many_requests_are_refused(app: App, port: int) -> None:
    """While the maximum number of requests is being answered, another gets 503; later one is accepted."""
    held = [connect(port) for _ in range(MOST)]
    for connection in held:
        connection.sendall(b"GET /wait HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
    time.sleep(0.2)
    status, headers, body = get(port)
    assert (status, headers["retry-after"]) == (503, "1")
    assert json.loads(body)["error"]["type"] == "server_error"
    app.go.set()
    for connection in held:
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        connection.close()
    assert get(port)[0] == 200


def test_an_answer_that_nobody_reads_is_ended(app: App, port: int) -> None:
    with connect(port) as connection:
        connection.sendall(b"GET /flood HTTP/1.1\r\nHost: localhost\r\n\r\n")
        end = time.monotonic() + 10.0
        while not app.floods_ended and time.monotonic() < end:
            time.sleep(0.05)
    assert app.floods_ended == 1, "what is sent on a closed connection is dropped"
