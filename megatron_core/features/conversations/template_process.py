"""The process in which chat templates are compiled and rendered, because they come from others' files.

A template can neither take more time than its limit, nor more memory than ``template_sandbox.MOST_MEMORY``: the process
is ended, and the next request starts another one.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_core.errors import DataError

PROGRAM = Path(__file__).with_name("template_sandbox.py")
START = "import sys, runpy; sys.path += sys.argv[3:]; runpy.run_path(sys.argv[1], run_name='__main__')"
"""Isolated mode ignores PYTHONPATH and files that Python runs at its start, so the search path is passed."""
START_SECONDS = 60.0
"""Time limit for starting Python."""
MOST_DEATHS = 2
"""A request is repeated once: the system may have ended the process for a reason that is not in the template."""


class TemplateProcess:
    """A process with the templates of all ``ChatTemplate`` objects; it starts with the first request.

    Threads share it, one request at a time. A forked process starts its own. If the process dies, another one is
    started; a request during which two processes die is an error.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        os.register_at_fork(after_in_child=self._leave)
        atexit.register(self._end)

    def request(self, content: Mapping[str, Any], sources: Sequence[str | None], seconds: float) -> dict[str, Any]:
        """The reply to a request about the template of ``sources``.

        Errors: ``TimeoutError`` after ``seconds``; ``DataError`` if the template or the request cannot be used.
        """
        request = {**content, "sources": None, "seconds": seconds}
        deaths: list[int] = []
        with self._lock:
            while len(deaths) < MOST_DEATHS:
                reply = self._exchange(request, seconds)
                if isinstance(reply, int):
                    deaths.append(reply)
                elif "unknown" in reply:  # a new process has no template yet
                    request["sources"] = sources
                elif "refusal" in reply:
                    raise DataError(reply["refusal"])
                else:
                    return reply
        raise DataError(
            f"the process that renders the chat template ended twice, with status {deaths[-1]}; a template that takes "
            "too much memory does this: correct it, or free memory"
        )

    def _exchange(self, request: Mapping[str, Any], seconds: float) -> dict[str, Any] | int:
        """The reply of the process, or its exit status if it died."""
        try:
            # A value that JSON has not becomes the name of its type, as in `transformers`.
            data = json.dumps(request, ensure_ascii=False, default=lambda value: f"<{type(value).__name__}>")
        except (RecursionError, TypeError, ValueError) as error:
            raise DataError(f"the messages cannot be written as JSON ({error}); correct them") from None
        process, connection = self._running or self._start()
        try:
            connection.send_bytes(data.encode("utf-8", "surrogatepass"))
            if connection.poll(seconds):
                return json.loads(connection.recv_bytes())
        except (EOFError, OSError):
            self._end()
            return process.returncode
        except BaseException:  # interrupted: the reply would be taken for that of the next request
            self._end()
            raise
        self._end()
        raise TimeoutError

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        connection, other = Pipe()
        command = [sys.executable, "-I", "-S", "-c", START, str(PROGRAM), str(other.fileno()), *filter(None, sys.path)]
        # A session of its own: Ctrl+C in a terminal reaches only the parent, which may still read data.
        process = subprocess.Popen(
            command, pass_fds=[other.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        other.close()
        self._running = process, connection
        # The first reply comes after the imports, which are not a part of the time of a request.
        if connection.poll(START_SECONDS):
            with suppress(EOFError, OSError):
                connection.recv_bytes()
        return self._running

    def _end(self) -> None:
        """End the process; the next request starts another one."""
        if self._running is None:
            return
        process, connection = self._running
        self._running = None
        connection.close()
        process.kill()
        process.wait()

    def _leave(self) -> None:
        """In a forked process: forget the parent's process."""
        self._lock = threading.Lock()
        if self._running is None:
            return
        process, connection = self._running
        self._running = None
        connection.close()
        process.returncode = 0  # the parent waits for it; the destructor must not


PROCESS = TemplateProcess()
"""The process that all templates share."""
