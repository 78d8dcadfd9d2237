"""The effect of one request on others, and server errors from a client's view."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.exceptions import HTTPException

from megatron_core.inference.openai_requests import RequestError
from megatron_core.inference.requests import Progress
from megatron_core.inference.web import Running, Server


class Protocol:
    """A tokenizer that is slow or fails."""

    model = "slow"

    def job(self, body: bytes, *, chat: bool) -> Any:
        if chat:
            raise KeyError("a fault")
        time.sleep(1.0)
        raise RequestError("late", "prompt")


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    service: Any = SimpleNamespace(engine=SimpleNamespace(running=0, waiting=0), failure=None)
    application = Server(service, Protocol()).application()  # type: ignore[arg-type]
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    yield listening.getsockname()[1]
    server.should_exit = True
    thread.join(timeout=20)


def answer(port: int, path: str, body: str | None = None) -> tuple[int, dict[str, Any]]:
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET" if body is None else "POST", path, body, {"Content-Type": "application/json"})
    found = connection.getresponse()
    status, text = found.status, found.read()
    connection.close()
    return status, json.loads(text)


def test_a_request_that_takes_long_to_read_delays_no_other(port: int) -> None:
    found: list[tuple[int, dict[str, Any]]] = []
    slow = threading.Thread(target=lambda: found.append(answer(port, "/v1/completions", "{}")))
    slow.start()
    answers = 0
    while slow.is_alive():
        assert answer(port, "/health")[0] == 200
        answers += not found
    assert answers > 3
    error = {"message": "late", "type": "invalid_request_error", "param": "prompt", "code": None}
    assert found == [(400, {"error": error})]


def test_a_fault_of_the_server_is_an_error_of_openai(port: int) -> None:
    status, found = answer(port, "/v1/chat/completions", "{}")
    assert status == 500 and found["error"]["type"] == "server_error" and "KeyError" in found["error"]["message"]


def test_a_request_without_a_next_token_is_one_error() -> None:
    """Logits that are not finite end the request with the reason; the engine continues with the others."""

    def submit(requests: list[Any], listeners: list[Any]) -> list[int]:
        listeners[0](Progress(0, None, finished="error", error="the largest logit is nan"))
        return [7]

    service: Any = SimpleNamespace(submit=submit)
    job: Any = SimpleNamespace(choices=[SimpleNamespace(request=None, finished=None)])

    async def read() -> None:
        running = Running(job, service)
        async for _ in running.pieces():
            pass

    with pytest.raises(HTTPException) as raised:
        asyncio.run(asyncio.wait_for(read(), 10))
    assert (raised.value.status_code, raised.value.detail) == (500, "the largest logit is nan")
