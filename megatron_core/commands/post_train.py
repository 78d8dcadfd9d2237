"""Serve a model for post-training with Tinker's API: its client trains and samples in any layout.

megatron-post-train --load-hf SmolLM2-135M --lora-rank 32 --save weights

megatron-post-train --nproc-per-node 2 --load-hf SmolLM2-135M --tensor-model-parallel-size 2 --save weights

The flags of megatron-train describe the model and the layout; --help lists those of the server.
Needs pip install starlette uvicorn h11 pydantic protobuf, or the extra "server" of this package.
"""

from megatron_core.commands.start import start, status_of

if __name__ == "__main__":
    start("post_train")

import os
import sys
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from megatron_core.command import program
from megatron_core.commands.serve import LOOPBACK_NAMES, is_loopback, listen, run_server, stop_between_steps
from megatron_core.config.cli import parse_command_line
from megatron_core.config.flags import grouped, plain, to_flag
from megatron_core.errors import ConfigError
from megatron_core.terminal import parse_flags

if TYPE_CHECKING:
    from megatron_core.parallel import World
    from megatron_core.post_training import Trainer

DEFAULTS = {
    "train_iters": "1000000",
    "lr": "1e-4",
    "lr_decay_style": "constant",
    "hidden_dropout": "0",
    "attention_dropout": "0",
}
"""Values of flags that are not given: each step has its own rates, and as many steps are taken as clients request."""


@dataclass(frozen=True, kw_only=True)
class PostTrainFlags:
    """The server's own flags."""

    host: str = "127.0.0.1"
    """Address to listen on; by default only this machine can connect. There is no authentication."""
    port: int = 8000
    """Port to listen on; 0: a free port, printed in the first line."""
    model_name: str | None = None
    """Name of the base model in requests; default: the name of the folder with its weights."""
    most_trainings: int = 8
    """Largest number of open trainings, each of which has its weights and optimizer state in memory."""
    most_copies: int = 8
    """Largest number of copies of weights in memory for sampling clients; the oldest one is forgotten."""
    max_waiting: int = 4096
    """Maximum number of waiting requests; further ones are refused with status 429, and clients try again."""
    max_request_bytes: int = 2**28
    """Maximum size of a request in bytes."""
    max_connections: int = 1024
    """Maximum number of open connections."""
    sampler_tensor_parallel: int = 1
    """Ranks that sample together, of which each has a part of every layer."""
    sampler_batch_size: int = 32
    """Maximum number of texts that a group of ranks samples together."""


def serve_trainings(settings: PostTrainFlags, trainer: "Trainer") -> None:
    """Listen on rank 0, and execute requests on all ranks until interrupted."""
    try:
        from megatron_core.post_training.tinker_server.operations import Operations
        from megatron_core.post_training.tinker_server.protocol import TinkerProtocol
        from megatron_core.post_training.tinker_server.service import OperationService
        from megatron_core.post_training.tinker_server.web import TinkerServer
    except ImportError as error:
        raise ConfigError(f"{error}: the server needs pip install starlette uvicorn h11 pydantic protobuf") from None
    for name in ("most_trainings", "most_copies", "max_waiting", "max_request_bytes", "max_connections"):
        if getattr(settings, name) < 1:
            raise ConfigError(f"{name}={getattr(settings, name)}: give 1 or more")
    listening = listen(settings.host, settings.port) if trainer.is_first_rank else None
    operations = Operations(
        trainer,
        most_copies=settings.most_copies,
        tensor_parallel=settings.sampler_tensor_parallel,
        max_batch_size=settings.sampler_batch_size,
    )
    service = OperationService(operations, most_waiting=settings.max_waiting)
    stop_between_steps()
    if listening is None:
        service.run()
        return
    checkpoint = trainer.run.config.checkpoint
    name = settings.model_name or os.path.basename(os.path.realpath(checkpoint.load_hf or checkpoint.load or "model"))
    protocol = TinkerProtocol(
        service, trainer, name=name, tokenizer=checkpoint.load_hf, most_trainings=settings.most_trainings
    )
    hosts = LOOPBACK_NAMES if is_loopback(settings.host) else ("*",)
    application = TinkerServer(service, protocol, max_bytes=settings.max_request_bytes).application(hosts)
    remark = f"longest text {trainer.run.config.data.seq_length} tokens"
    run_server(service, application, listening, f"{name}: listening at", remark, settings.max_connections)


def main() -> None:
    """Parse the flags, run and exit."""
    if sys.argv[1:2] in (["--help"], ["-h"]):
        parse_flags(PostTrainFlags, description=__doc__)
    # A process without a launcher refuses wrong flags before it loads torch. The ranks of a job report one error
    # together, for which they need the job.
    if "WORLD_SIZE" not in os.environ and (status := status_of(_check_flags)):
        sys.exit(status)
    from megatron_core.parallel import run_job

    run_job(_job)


def _check_flags() -> None:
    own_words, words = _split(sys.argv[1:])
    parse_flags(PostTrainFlags, args=own_words)
    parse_command_line(words, prog=program())


def _job(world: "World") -> None:
    from megatron_core.post_training import Trainer
    from megatron_core.training import read_settings

    own_words, words = _split(sys.argv[1:])
    settings = parse_flags(PostTrainFlags, args=own_words, console_outputs=world.rank == 0)
    config, _ = read_settings(os.path.basename(sys.argv[0]), words)
    serve_trainings(settings, Trainer(config))


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """The words of the server's flags, and those of the training's, with defaults for what requests decide."""
    names = {field.name for field in fields(PostTrainFlags)}
    own_words: list[str] = []
    training_words: list[str] = []
    for flag, values in grouped(words):
        (own_words if plain(flag) in names else training_words).extend([flag, *values])
    present = {plain(flag) for flag, _ in grouped(training_words)}
    for name, value in DEFAULTS.items():
        training_words += [] if name in present else [to_flag(name), value]
    return own_words, training_words
