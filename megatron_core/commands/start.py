"""Start of every command: its program name, ``--version``, several ranks on this machine, then its module's ``main``.

It imports nothing that takes long, so that Ctrl-C and missing libraries are handled while the module is imported.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_core.command import INTERRUPTED, begin_program, end_at_once, program
from megatron_core.errors import MegatronError, visible
from megatron_core.launcher import read_launcher
from megatron_core.terminal import PRINT_COMPLETION, discard, parse_flags

if TYPE_CHECKING:
    from megatron_core.parallel import World

DISTRIBUTION = "megatron-native"
_SHORT = {
    "convert_checkpoint": "convert",
    "generate_text": "generate",
    "plan_layout": "plan",
    "preprocess_data": "preprocess",
    "train_tokenizer": "tokenizer",
    "verify_layout": "verify",
}
"""Names of commands that differ from their modules."""
RANKED = frozenset({"train", "generate_text", "serve", "post_train"})
"""Modules of commands that run on several ranks."""
NPROC = "--nproc-per-node"


def command_name(module: str) -> str:
    """Name of the command of a module of this package, such as ``megatron-preprocess``."""
    return "megatron-" + _SHORT.get(module, module).replace("_", "-")


def modules() -> dict[str, str]:
    """The module of each command, by the command's name."""
    names = sorted(path.stem for path in Path(__file__).parent.glob("*.py"))
    return {command_name(name): name for name in names if not name.startswith(("__init__", "start"))}


def command() -> NoReturn:
    """Entry point of the installed commands: start the one with this program's name."""
    # without the folder, which the help would show
    known = modules()
    sys.argv[0] = program()
    if program() not in known:
        sys.exit(f"{program()}: not a command of {DISTRIBUTION}; the commands are {', '.join(known)}")
    start(known[program()])


def start(module: str) -> NoReturn:
    """Import a module of this package, run its ``main`` and exit as ``run_tool`` does.

    ``--version`` alone prints the version, ``--print-completion bash`` (or zsh, tcsh) a script that completes the
    command's flags. ``--nproc-per-node N`` of a command that runs on several ranks starts N of them on this machine;
    torchrun, srun and mpirun start them too.
    """
    end_on_interrupt()
    if Path(sys.argv[0]).parent == Path(__file__).parent:  # python -m
        sys.argv[0] = command_name(module)
    if sys.argv[1:] == ["--version"]:
        print(f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}, torch {importlib.metadata.version('torch')}")
        sys.exit(0)
    if sys.argv[1:2] == ["--print-completion"]:
        sys.argv[1] = PRINT_COMPLETION
    if module in RANKED and any(word.split("=")[0].replace("_", "-") == NPROC for word in sys.argv[1:]):
        _start_ranks(module, sys.argv[1:])
    if module in RANKED:
        read_launcher()
    run_tool(program(), importlib.import_module(f"{__package__}.{module}").main)


def status_of(tool: Callable[[], int | None], *, failed: int = 1) -> int:
    """The result of ``tool``, 0 for None; ``failed`` and one line for an error that the user can fix."""
    try:
        return tool() or 0
    except BrokenPipeError:
        raise  # ``run_tool`` ends without a message: the reader of the output, such as ``head``, has ended
    except (MegatronError, OSError) as error:
        print(f"{program()}: {error}", file=sys.stderr)
        return failed


def run_ranked(kind: Callable[..., Any], description: str | None, job: Callable[[Any, World], None]) -> NoReturn:
    """Parse the flags of ``kind``, run ``job`` with them on this rank, and exit."""
    # A process without a launcher answers --help and wrong flags before it loads torch, which takes a second. The ranks
    # of a job report one error together, for which they need the job.
    settings = None if "WORLD_SIZE" in os.environ else parse_flags(kind, description=description)
    from megatron_core.parallel import run_job

    def run(world: World) -> None:
        job(settings or parse_flags(kind, description=description, console_outputs=world.rank == 0), world)

    run_job(run)


def _start_ranks(module: str, words: list[str]) -> NoReturn:
    """Replace this process by one that starts the ranks, with the other ``words`` as their flags."""
    position = next(position for position, word in enumerate(words) if word.split("=")[0].replace("_", "-") == NPROC)
    _, equals, value = words[position].partition("=")
    further_words = words[position + 1 :] if equals else words[position + 2 :]
    value = value if equals else next(iter(words[position + 1 :]), "")
    if not (value.isascii() and value.isdigit() and 0 < int(value) < 10**6):
        sys.exit(f"{program()}: {NPROC} {value} must be an integer >= 1: the number of ranks on this machine")
    if "RANK" in os.environ:
        sys.exit(f"{program()}: {NPROC} starts ranks, but torchrun has started this one; remove {NPROC}")
    starter = ["-m", f"{__package__}.start_ranks", value, f"{__package__}.{module}"]
    # The ranks import this package, also if a script of another folder started it.
    places = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    if int(value) > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores; torchrun sets it, too
    options = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # -X, -W, ..., as multiprocessing does
    os.execve(sys.executable, [sys.executable, *options, *starter, *words[:position], *further_words], environment)


def end_on_interrupt() -> None:
    """Until ``begin_program``, let Ctrl-C and libraries that cannot be loaded end the process without a traceback."""
    sys.excepthook = _say_what_is_missing
    end_at_once()


def _say_what_is_missing(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(error_type, ImportError | MemoryError | OSError | SystemError):
        sys.__excepthook__(error_type, error, trace)
        return
    print(
        f"{program()}: a library cannot be loaded: {str(error) or error_type.__name__}; install it, or "
        "allow more memory (ulimit -v): torch takes about 1 GiB",
        file=sys.stderr,
    )


def run_tool(name: str, tool: Callable[[], int | None], *, interrupted: str = "") -> NoReturn:
    """Run a tool and exit with its return value; with 1 and one line for an error that the user can fix; or, after
    Ctrl-C, with ``INTERRUPTED`` and the text ``interrupted``."""
    begin_program()
    try:
        status = tool()
        sys.stdout.flush()
    except KeyboardInterrupt:
        if interrupted:
            print(f"{name}: {interrupted}", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except MemoryError:
        sys.exit(f"{name}: out of memory; use smaller sizes, or a machine with more memory")
    except (MegatronError, OSError) as error:
        if isinstance(error, OSError) and error.filename is None:  # otherwise Python would try to flush it again
            discard(sys.stdout)
        sys.exit(1 if isinstance(error, BrokenPipeError) else visible(f"{name}: {error}"))
    sys.exit(status)
