"""Tinker's API over HTTP with starlette; an illegal request gets an error message, and affects no other."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from megatron_core.errors import DataError, MegatronError
from megatron_core.inference.connections import received_body
from megatron_core.post_training.tinker_server import bodies
from megatron_core.post_training.tinker_server.catalog import NotFoundError
from megatron_core.post_training.tinker_server.protocol import JSON, PROTOBUF, TinkerProtocol
from megatron_core.post_training.tinker_server.sampling import Json
from megatron_core.post_training.tinker_server.service import BusyError, GoneError, OperationService

POLL_SECONDS = 20.0
"""A result that takes longer is asked for again; the client waits 45 seconds for an answer."""
BODY_SECONDS = 60.0
"""Time limit for receiving a request."""
CLIENT_CLOSED_REQUEST = 499
RETRY_SECONDS = "10"
"""Time after which a refused client tries again; it does so ten times, which outlasts ``SESSION_SECONDS``."""
HandlerInput = TypeVar("HandlerInput")
HandlerResult = TypeVar("HandlerResult")


class TinkerServer:
    """Request handlers; ``max_bytes``: maximum size of a request."""

    def __init__(self, service: OperationService, protocol: TinkerProtocol, *, max_bytes: int = 2**28) -> None:
        self._service = service
        self._protocol = protocol
        self._max_bytes = max_bytes

    def application(self, hosts: Sequence[str] = ("*",)) -> Starlette:
        """Create the application; ``hosts``: host names accepted in requests."""
        protocol = self._protocol
        posts: dict[str, Callable[[bytes], Json]] = {
            "client/config": protocol.client_config,
            "client/dynamic_config": lambda body: {"sample_cancel_enabled": True},
            "telemetry": lambda body: {"status": "accepted"},
            "create_session": protocol.create_session,
            "session_heartbeat": protocol.heartbeat,
            "create_model": protocol.create_model,
            "get_info": protocol.info,
            "unload_model": protocol.unload_model,
            "forward_backward": protocol.forward_backward,
            "optim_step": protocol.optim_step,
            "save_weights": protocol.save_weights,
            "save_weights_for_sampler": protocol.save_for_sampler,
            "load_weights": protocol.load_weights,
            "create_sampling_session": protocol.create_sampler,
            "asample": protocol.sample,
            "cancel_future": protocol.cancel,
            "weights_info": protocol.catalog.weights_info,
        }
        gets: dict[str, Callable[[Mapping[str, str]], Json]] = {
            "get_server_capabilities": protocol.capabilities,
            "samplers/{sampler}": protocol.sampler,
            "sessions": protocol.sessions,
            "sessions/{session}": protocol.session,
            "training_runs": protocol.catalog.runs,
            "training_runs/{run}": protocol.catalog.run,
            "training_runs/{run}/checkpoints": protocol.catalog.checkpoints,
            "checkpoints": protocol.catalog.checkpoints,
        }
        routes = [
            Route(f"/api/v1/{path}", partial(self._answer, handler), methods=["POST"])
            for path, handler in posts.items()
        ]
        routes += [
            Route("/api/v1/healthz", self.status),
            Route("/api/v1/retrieve_future", self.retrieve, methods=["POST"]),
            Route("/api/v1/sessions/{session}/finish", self.finish, methods=["POST"]),
            Route("/api/v1/training_runs/{run}/checkpoints/{kind}/{name}", self.delete, methods=["DELETE"]),
        ]
        routes += [Route(f"/api/v1/{path}", partial(self._describe, handler)) for path, handler in gets.items()]
        middleware = [Middleware(TrustedHostMiddleware, allowed_hosts=list(hosts))]
        return Starlette(
            routes=routes, middleware=middleware, exception_handlers={HTTPException: _refusal, Exception: _failure}
        )

    async def _answer(self, handler: Callable[[bytes], Json], request: Request) -> Response:
        """Answer a request by ``handler``, in a thread: data of a step take long to read."""
        try:
            return JSONResponse(await _in_thread(handler, await self._body(request)))
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def _describe(self, handler: Callable[[Mapping[str, str]], Json], request: Request) -> Response:
        """Answer a question, in a thread: lists are read from the disk."""
        return JSONResponse(await _in_thread(handler, {**request.query_params, **request.path_params}))

    async def _body(self, request: Request) -> bytes:
        """Receive the body, of a type that browsers do not let pages of other sites send."""
        content_type = request.headers.get("content-type", "").split(";")[0].strip().lower()
        if content_type not in (JSON, PROTOBUF):
            raise HTTPException(415, f"send the request as Content-Type: {JSON} or {PROTOBUF}")
        if encoding := request.headers.get("content-encoding"):
            raise HTTPException(415, f"Content-Encoding: {encoding} is not supported; send the request as it is")
        return await received_body(request, most=self._max_bytes, seconds=BODY_SECONDS)

    async def status(self, request: Request) -> Response:
        """Whether the ranks run."""
        failed = self._service.failure is not None
        return JSONResponse({"status": "failed" if failed else "ok"}, 500 if failed else 200)

    async def retrieve(self, request: Request) -> Response:
        """The result of an earlier request, as soon as it is there."""
        try:
            number = bodies.read_body(bodies.Retrieve, await self._body(request)).request_id
            future = self._service.future(number)
        except DataError as error:
            raise HTTPException(400, str(error)) from None
        except GoneError as error:
            raise HTTPException(410, str(error)) from None
        except ClientDisconnect:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        result = asyncio.wrap_future(future)
        # A failure that arrives after the wait is reported to the next poll.
        result.add_done_callback(lambda ended: ended.cancelled() or ended.exception())
        done, _ = await asyncio.wait([result], timeout=POLL_SECONDS)
        if not done:
            pending = {"type": "try_again", "request_id": number, "queue_state": "active"}
            return JSONResponse(pending, 408)
        failure = future.exception()
        if failure is not None:
            category = "user" if isinstance(failure, DataError) else "server"
            return JSONResponse({"error": str(failure), "category": category})
        content_type, content = future.result()
        return Response(content, media_type=content_type)

    async def finish(self, request: Request) -> Response:
        """End a session, and forget its trainings and samplers."""
        await self._body(request)
        self._protocol.end(request.path_params["session"])
        return Response(status_code=204)

    async def delete(self, request: Request) -> Response:
        """Delete stored weights."""
        await _in_thread(self._protocol.delete, request.path_params)
        return Response(status_code=204)


async def _in_thread(handler: Callable[[HandlerInput], HandlerResult], question: HandlerInput) -> HandlerResult:
    """The result of a handler; its errors become those of HTTP."""
    try:
        return await asyncio.to_thread(handler, question)
    except NotFoundError as error:
        raise HTTPException(404, str(error)) from None
    except BusyError as error:
        raise HTTPException(429, str(error), {"Retry-After": RETRY_SECONDS}) from None
    except MegatronError as error:
        raise HTTPException(400, str(error)) from None


async def _refusal(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = error.detail
    if error.status_code == 404 and message == "Not Found":
        message = f"{request.url.path[:100]!r} is not supported by this server"
    return JSONResponse({"detail": message, "error": message}, error.status_code, error.headers)


async def _failure(request: Request, error: Exception) -> Response:
    """Answer after an error of the server; starlette logs the error."""
    message = f"the server failed with {type(error).__name__}; see its log"
    return JSONResponse({"detail": message, "error": message}, 500)
