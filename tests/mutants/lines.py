"""Which lines of the mutated modules a judge executes, also in forked ranks and other threads."""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from tests.mutants.targets import ROOT, modules


class Lines:
    """A byte for each line of the mutated modules, in memory that forked processes share."""

    def __init__(self) -> None:
        self.first: dict[str, int] = {}
        size = 0
        for module in modules():
            path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
            self.first[str(path)] = size
            size += len(path.read_text().splitlines()) + 1
        self._shared = mmap.mmap(-1, size)
        self._size = size

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the lines that this process, its forks and their new threads execute."""
        sys.settrace(self._enter)
        threading.settrace(self._enter)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def take(self) -> set[int]:
        """The numbers of the lines recorded since the last call."""
        content = self._shared[: self._size]
        self._shared[: self._size] = bytes(self._size)
        return {number for number, value in enumerate(content) if value}

    def numbers(self, module: str, lines: tuple[int, int]) -> range:
        """The numbers of the lines of a module, first to last."""
        first = self.first[str(Path(ROOT, *module.split(".")).with_suffix(".py"))]
        return range(first + lines[0], first + lines[1] + 1)

    def of_module(self, module: str) -> range:
        """The numbers of the lines of a module."""
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py")
        return self.numbers(module, (0, len(path.read_text().splitlines())))

    def _enter(self, frame: FrameType, event: str, argument: Any) -> Any:
        first = self.first.get(frame.f_code.co_filename)
        if first is None:
            return None
        shared = self._shared

        def on_line(frame: FrameType, event: str, argument: Any) -> Any:
            shared[first + frame.f_lineno] = 1
            return on_line

        return on_line
