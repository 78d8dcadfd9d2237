"""OpenAI's interface over HTTP with starlette; an illegal request gets an error message, and affects no other."""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from pathlib import Path

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from megatron_core.errors import ConfigError, DataError
from megatron_core.inference.connections import received_body
from megatron_core.inference.openai import Continuation, Json, Protocol, WebJob
from megatron_core.inference.openai_requests import RequestError
from megatron_core.inference.requests import Progress
from megatron_core.inference.service import GenerationService, Listener, QueueFullError

PAGE = Path(__file__).with_name("page")
"""The page for browsers, with its style and scripts."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'"
)
BODY_SECONDS = 30.0
"""Time limit for receiving a request."""
CLIENT_CLOSED_REQUEST = 499
LONGEST_PATH = 100
"""Characters of a path in an error message."""


class EventStream(StreamingResponse):
    """Server-sent events; ``end`` is called after the last event or when the client disconnects."""

    def __init__(self, events: AsyncIterator[str], end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._end = end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            with suppress(ClientDisconnect):  # ``end`` cancels the request
                await super().__call__(scope, receive, send)
        finally:
            self._end()


class Running:
    """The requests of a job in the service, and their progress."""

    def __init__(self, job: WebJob, service: GenerationService) -> None:
        self.job = job
        self._service = service
        self._arrived: asyncio.Queue[tuple[Continuation, Progress | None]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listener(choice: Continuation) -> Listener:
            def arrive(progress: Progress | None) -> None:
                with suppress(RuntimeError):  # the loop is closed: the server is stopping
                    loop.call_soon_threadsafe(self._arrived.put_nowait, (choice, progress))

            return arrive

        requests = [choice.request for choice in job.choices]
        self._tickets = service.submit(requests, [listener(choice) for choice in job.choices])

    async def pieces(self) -> AsyncIterator[tuple[Continuation, str, int]]:
        """Yield each choice with progress, its new text, and the number of its tokens reported before."""
        left = len(self.job.choices)
        while left:
            choice, progress = await self._arrived.get()
            if progress is None:
                raise HTTPException(500, "the model failed; the server is stopping")
            if choice.finished is not None:
                continue  # computed by the engine before it received the cancellation
            if progress.error is not None:
                raise HTTPException(500, progress.error)
            before = len(choice.scores)
            text = choice.add(progress)
            if choice.finished is not None:
                left -= 1
                self._service.cancel([self._tickets[choice.index]])
            yield choice, text, before

    def end(self) -> None:
        """Cancel unfinished requests."""
        self._service.cancel(self._tickets)


class Server:
    """Request handlers; ``max_bytes``: maximum size of a request."""

    def __init__(self, service: GenerationService, protocol: Protocol, *, max_bytes: int = 2**20) -> None:
        self._service = service
        self._protocol = protocol
        self._max_bytes = max_bytes

    def application(self, hosts: Sequence[str] = ("*",)) -> Starlette:
        """Create the application; ``hosts``: host names accepted in requests."""
        routes = [
            Route("/", self.page),
            Mount("/page", StaticFiles(directory=PAGE)),
            Route("/health", self.status),
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))]
        return Starlette(
            routes=routes, middleware=middleware, exception_handlers={HTTPException: _refusal, Exception: _failure}
        )

    async def page(self, request: Request) -> Response:
        """A page for chats with the model."""
        text = (PAGE / "index.html").read_text(encoding="utf-8")
        return HTMLResponse(text, headers={"Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff"})

    async def status(self, request: Request) -> Response:
        """Whether the model runs, and the numbers of running and waiting requests."""
        engine = self._service.engine
        failed = self._service.failure is not None
        load = {"running": engine.running, "waiting": engine.waiting}
        return JSONResponse({"status": "failed" if failed else "ok", **load}, 500 if failed else 200)

    async def models(self, request: Request) -> Response:
        """The list of the model."""
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """The model, by its name."""
        try:
            self._protocol.check_model(request.path_params["name"])
        except RequestError as error:
            return _refused(error)
        return JSONResponse(self._model())

    def _model(self) -> Json:
        """Name and maximum length of the model, and whether it has a chat template."""
        entry = {"id": self._protocol.model, "object": "model", "created": 0, "owned_by": "megatron_core"}
        length = self._protocol.limits.max_length
        chats = self._protocol.template is not None
        return {**entry, "max_model_len": length, "has_chat_template": chats}

    async def completions(self, request: Request) -> Response:
        """Continuations of prompts."""
        return await self._answer(request, chat=False)

    async def chat(self, request: Request) -> Response:
        """Answers to chats."""
        return await self._answer(request, chat=True)

    async def _answer(self, request: Request, *, chat: bool) -> Response:
        try:
            body = await self._body(request)
            # In a thread: a long prompt takes seconds to tokenize, and a chat template may take as long.
            job = await asyncio.to_thread(self._protocol.job, body, chat=chat)
            running = Running(job, self._service)
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except RequestError as error:
            return _refused(error)
        except (DataError, ConfigError) as error:
            raise HTTPException(400, str(error)) from None
        except QueueFullError as error:
            full = _error(429, str(error), code="rate_limit_exceeded")
            return JSONResponse(full, 429, {"Retry-After": "1"})
        object_name = "chat.completion" if chat else "text_completion"
        name = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        identity = {"id": name, "created": int(time.time()), "model": self._protocol.model}
        if job.stream:
            usage = {"usage": None} if job.include_usage else {}  # with a value in the last event
            head = {**identity, "object": "chat.completion.chunk" if chat else object_name, **usage}
            return EventStream(self._events(running, head), running.end)
        generation = asyncio.ensure_future(self._whole(running))
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({generation, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not generation.done():
                return Response(status_code=CLIENT_CLOSED_REQUEST)
            choices = await generation
        finally:
            generation.cancel()
            gone.cancel()
            running.end()
        return JSONResponse({**identity, "object": object_name, "choices": choices, "usage": job.usage()})

    async def _whole(self, running: Running) -> list[Json]:
        async for _ in running.pieces():
            pass
        return [self._protocol.choice_json(running.job, choice) for choice in running.job.choices]

    async def _events(self, running: Running, head: Json) -> AsyncIterator[str]:
        job = running.job
        for choice in job.choices:
            if job.chat:
                delta = {"index": choice.index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield _event({**head, "choices": [delta]})
            elif choice.echo:
                first_choice = {"index": choice.index, "text": choice.echo, "logprobs": None, "finish_reason": None}
                yield _event({**head, "choices": [first_choice]})
        try:
            async for choice, text, before in running.pieces():
                if text or choice.finished or len(choice.scores) > before:
                    yield _event({**head, "choices": [self._protocol.delta_json(job, choice, text, before)]})
        except HTTPException as error:  # the status has been sent
            yield _event(_error(error.status_code, error.detail))
            return
        if job.include_usage:
            yield _event({**head, "choices": [], "usage": job.usage()})
        yield "data: [DONE]\n\n"

    async def _body(self, request: Request) -> bytes:
        """Receive the body, which must be declared as JSON: browsers do not let pages of other sites send this type."""
        content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type != "application/json":
            raise HTTPException(415, "send the request as Content-Type: application/json")
        return await received_body(request, most=self._max_bytes, seconds=BODY_SECONDS)


async def _disconnected(request: Request) -> None:
    """Wait until the client disconnects; its request has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    path = repr(request.url.path[:LONGEST_PATH])
    if error.status_code == 404:
        message = f"{path} is not a path of this server; for clients of OpenAI, base_url ends with /v1"
    elif error.status_code == 405:
        allowed = ", ".join(sorted((error.headers or {}).get("Allow", "GET").split(", ")))  # a set there
        message = f"{path} does not answer {request.method}; use {allowed}"
    return JSONResponse(_error(error.status_code, message), error.status_code, error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    """Answer after an error of the server; starlette logs the error."""
    return JSONResponse(_error(500, f"the server failed with {type(error).__name__}; see its log"), 500)


def _refused(error: RequestError) -> Response:
    content = _error(error.status, str(error), error.param, error.code)
    if error.room is not None:
        content["error"]["room"] = error.room
    return JSONResponse(content, error.status)


def _error(status: int, message: str, param: str | None = None, code: str | None = None) -> Json:
    """OpenAI's error object."""
    category = "rate_limit_error" if status == 429 else "invalid_request_error"
    category = "server_error" if status >= 500 else category
    return {"error": {"message": message, "type": category, "param": param, "code": code}}


def _event(content: Json) -> str:
    return f"data: {json.dumps(content)}\n\n"
