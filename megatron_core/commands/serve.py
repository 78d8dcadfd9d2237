"""Serve a trained model with OpenAI's completions and chat API, and a chat page.

megatron-serve --load runs/quickstart/checkpoints

megatron-serve --nproc-per-node 2 --load SmolLM2-135M --tensor-model-parallel-size 2

Needs pip install starlette uvicorn h11 pydantic, or the extra "server" of this package.
"""

from megatron_core.commands.start import run_ranked, start

if __name__ == "__main__":
    start("serve")

import ipaddress
import os
import signal
import socket
import threading
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron_core.errors import ConfigError
from megatron_core.inference.settings import GenerationLayout, InferenceConfig

if TYPE_CHECKING:
    from megatron_core.parallel import World

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True, kw_only=True)
class ServeFlags(InferenceConfig, GenerationLayout):
    """Answer requests in OpenAI's format with a trained model, in any layout."""

    load: str
    """Folder of checkpoints (--save of the training, also of Megatron-LM), of a single checkpoint, or of a Hugging Face
    model."""
    ckpt_step: int | None = None
    """Iteration to load; default: the latest."""
    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine can connect. There is no authentication."""
    port: int = 8000
    """Port to listen on; 0: a free port, printed in the first line."""
    model_name: str | None = None
    """Name of the model in responses; default: the folder's name."""
    chat_template: str | None = None
    """File of a Jinja chat template; default: that of --sft, else the tokenizer's."""
    max_batch_size: int = 32
    """Maximum number of texts that are generated together."""
    max_waiting: int = 64
    """Maximum number of waiting texts; further requests are refused with status 429."""
    max_length: int | None = None
    """Maximum number of tokens of a prompt with its continuation; default and maximum: the model's positions.
    With --rope-scaling-type longrope it chooses short or long factors."""
    max_request_bytes: int = 2**20
    """Maximum size of a request in bytes."""
    max_connections: int = 256
    """Maximum number of open connections; a further one replaces the oldest whose request is incomplete, or is refused
    with status 503."""


def serve_requests(settings: ServeFlags, world: "World") -> None:
    """Load the model, listen on rank 0, and generate on all ranks until interrupted."""
    from megatron_core.features.conversations.chat_template import chat_template_of
    from megatron_core.inference.engine import Engine
    from megatron_core.inference.generator import start_generator
    from megatron_core.inference.service import GenerationService
    from megatron_core.training.compatibility import open_model

    try:
        from megatron_core.inference.openai import Protocol, RequestLimits
        from megatron_core.inference.web import Server
    except ImportError as error:
        raise ConfigError(f"{error}: the server needs pip install starlette uvicorn h11 pydantic") from None
    for name in ("max_batch_size", "max_waiting", "max_request_bytes", "max_connections"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name}={getattr(settings, name)}: give 1 or more")
    if settings.max_length is not None and settings.max_length < 2:
        raise ConfigError(f"max_length={settings.max_length}: give 2 or more, one for a prompt and one for a new token")
    listening = listen(settings.host, settings.port) if world.rank == 0 else None
    reader, trained = open_model(settings.load, settings.ckpt_step)
    longest = trained.max_positions if settings.max_length is None else settings.max_length
    if longest > trained.max_positions:
        raise ConfigError(f"max_length={longest} exceeds the model's positions; give at most {trained.max_positions}")
    generator, tokenizer = start_generator(reader, trained, settings, world)
    engine = Engine(generator, max_batch_size=settings.max_batch_size, max_length=longest, config=settings)
    service = GenerationService(engine, max_waiting=settings.max_waiting)
    stop_between_steps()
    if listening is None:
        service.run()
        return
    assert engine.max_length is not None
    limits = RequestLimits(min(engine.max_length, engine.cache_positions), min(settings.max_waiting, 64))
    template = chat_template_of(tokenizer, settings.chat_template or trained.data.chat_template)
    name = settings.model_name or os.path.basename(os.path.realpath(settings.load))
    protocol = Protocol(tokenizer, template, limits, name, generator.vocab_size, generator.before_prompt)
    hosts = LOOPBACK_NAMES if is_loopback(settings.host) else ("*",)
    application = Server(service, protocol, max_bytes=settings.max_request_bytes).application(hosts)
    remark = f"longest text {limits.max_length} tokens"
    run_server(service, application, listening, f"{name}: listening at", remark, settings.max_connections)


class Stoppable(typing.Protocol):
    """A service that runs in a thread."""

    failure: BaseException | None

    def start(self, when_ended: Callable[[], None]) -> threading.Thread:
        """Run in a thread, then call ``when_ended``."""

    def stop(self) -> None:
        """End the thread."""


def stop_between_steps() -> None:
    """Let rank 0 stop all ranks between two steps; uvicorn installs its own signal handlers, which call these
    afterwards."""
    if threading.current_thread() is threading.main_thread():
        for ending in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ending, lambda number, frame: None)


def run_server(
    service: Stoppable, application: Any, listening: socket.socket, title: str, remark: str, max_connections: int
) -> None:
    """Print the address, and answer requests by ``application`` until interrupted or until ``service`` ends.

    Errors: those of the service.
    """
    import uvicorn

    from megatron_core.inference.connections import bounded

    server = uvicorn.Server(
        uvicorn.Config(
            application,
            http=bounded(max_connections),
            ws="none",
            timeout_graceful_shutdown=1,
            log_level="warning",
        )
    )
    thread = service.start(when_ended=lambda: setattr(server, "should_exit", True))
    address = listening.getsockname()
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    print(f"{title} http://{host}:{address[1]}, {remark}", flush=True)
    try:
        server.run(sockets=[listening])
    finally:
        service.stop()
        thread.join(timeout=60.0)
    if service.failure is not None:
        raise service.failure


def listen(host: str, port: int) -> socket.socket:
    """The listening socket."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family)
    except (OSError, OverflowError) as error:
        raise ConfigError(f"host={host!r} port={port} cannot be used: {error}") from None


def is_loopback(host: str) -> bool:
    """Whether ``host`` is reachable only from this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def main() -> None:
    """Parse the flags, run and exit."""
    run_ranked(ServeFlags, __doc__, serve_requests)
