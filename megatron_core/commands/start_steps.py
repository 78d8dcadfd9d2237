"""Commands of this package that run one after another, with the remaining time and a log."""

import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron_core.commands.start import command_name
from megatron_core.errors import MegatronError

SHOWN = re.compile(r".*  iteration \d.*|validation loss at.*|.* documents, \S+ (MB|tokens)$|.* layouts hold")
"""The output of a step that is shown; all of it is in the log."""
START_SECONDS = 5.0
"""Seconds in which a training starts and saves."""


class TimedSteps:
    """Run commands of this package one after another, with the remaining time before each, and a log of all output."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.log.write_text("")
        self.expected: dict[str, float] = {}
        """Expected seconds of the steps that have not ended."""
        self._total = 0
        self._slowness = 1.0
        """Seconds that the latest long step took / expected ones: the machine may have other work."""

    def plan(self, expected: Mapping[str, float]) -> None:
        """Set the steps to come."""
        self.expected = dict(expected)
        self._total = len(expected)

    def run(self, title: str, module: str, *flags: object) -> None:
        """Run a command; a failure ends the program with the last lines of its output."""
        print(self._heading(title), flush=True)
        began = time.monotonic()
        latest: list[str] = []
        with self.started(module, *flags) as process, self.log.open("a", encoding="utf-8") as log:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                latest = [*latest, line][-15:]
                if line_to_show := SHOWN.match(line.rstrip()):
                    print(f"    {line_to_show[0]}", flush=True)
            process.wait()
        if process.returncode:
            text = "".join(latest)
            raise MegatronError(f"the step {title!r} failed with status {process.returncode}; {self.log}:\n{text}")
        seconds = time.monotonic() - began
        expected = self.expected.pop(title, 0.0)
        if expected > 2 * START_SECONDS:
            self._slowness = seconds / expected

    @contextmanager
    def started(self, module: str, *flags: object) -> Iterator[subprocess.Popen[str]]:
        """Start a command, on the CPU; at the end it is terminated, unless it has ended."""
        words = [str(flag) for flag in flags]
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n$ {command_name(module)} {shlex.join(words)}\n")
        # One thread for each rank: ranks that share the cores would wait for each other's threads. The layouts need two
        # devices, which a machine with one GPU has only as CPU ranks.
        environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONUNBUFFERED": "1"}
        command = [sys.executable, "-m", f"{__package__}.{module}", *words]
        with subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as process:
            try:
                yield process
            finally:
                process.terminate()

    def _heading(self, title: str) -> str:
        if title not in self.expected:
            return title
        left = self._slowness * sum(self.expected.values())
        text = f"{left:.0f} s" if left < 120 else f"{left / 60:.0f} min"
        return f"[{self._total - len(self.expected) + 1}/{self._total}] {title:24} about {text} left"
