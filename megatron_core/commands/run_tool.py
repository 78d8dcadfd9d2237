"""The end of a command: its exit status, and errors in one line."""

import sys
from collections.abc import Callable
from typing import NoReturn

from megatron_core.command import INTERRUPTED, begin_program
from megatron_core.errors import MegatronError, visible
from megatron_core.terminal import discard


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
