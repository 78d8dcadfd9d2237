"""Names and texts from files and models cannot control a terminal; files and pipes receive them unchanged."""

from __future__ import annotations

import os
import pty
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tqdm import tqdm

from megatron_core.commands.generate_text import print_on_first_rank
from megatron_core.commands.plot_metrics import plot as plot_metrics
from megatron_core.errors import DataError, visible
from megatron_core.parallel import World
from megatron_core.terminal import Terminal, colours, exact, parse_flags, protect_terminal

EVIL = "a\x1b[31m\x07\x9b2J\x7f\r\u202e b\tc\nd\u00a0\u3000é"
SHOWN = "a\\x1b[31m\\x07\\x9b2J\\x7f\\r\\u202e b\tc\nd\u00a0\u3000é"


@contextmanager
def on_terminal() -> Iterator[int]:
    """The other end of a terminal used as standard output and standard error."""
    other, own = pty.openpty()
    kept = sys.stdout, sys.stderr
    with open(own, "w", encoding="utf-8", newline="") as stream:
        sys.stdout = sys.stderr = stream
        protect_terminal()
        protect_terminal()  # repeated calls have no effect
        try:
            yield other
        finally:
            sys.stdout, sys.stderr = kept
    os.close(other)


def received(terminal: int) -> str:
    """The output to a terminal, with ``\r\n`` for each newline."""
    data = b""
    while select.select([terminal], [], [], 0.2)[0]:  # a read gives a part
        data += os.read(terminal, 1 << 16)
    return data.decode().replace("\r\n", "\n")


def test_generated_text_is_escaped_on_a_terminal() -> None:
    with on_terminal() as terminal:
        print_on_first_rank(EVIL, World(0, 1, 0, None))
        assert received(terminal) == SHOWN


def test_warnings_and_messages_are_escaped_on_a_terminal() -> None:
    with on_terminal() as terminal:
        print(EVIL, file=sys.stderr, flush=True)
        assert received(terminal) == SHOWN + "\n"
        assert plot_metrics(("folder/\x1b[2Jx",)) == 1
        assert "folder/\\x1b[2Jx cannot be read" in received(terminal)


def test_help_has_colours_and_no_other_control(monkeypatch: pytest.MonkeyPatch) -> None:
    with on_terminal() as terminal:
        monkeypatch.setenv("TERM", "xterm")

        def program(name: str = "\x1b[2J\x07") -> None:
            """A program."""

        with pytest.raises(SystemExit):
            parse_flags(program, args=["--help"])
        text = received(terminal)
        assert "\x1b[1m" in text and "\x1b[2J" not in text and "\x07" not in text
        with colours():
            print("\x1b[31mred\x1b[0m \x1b]0;title\x07", flush=True)
        assert received(terminal) == "\x1b[31mred\x1b[0m \\x1b]0;title\\x07\n"
        print("\x1b[31m", flush=True)
        assert received(terminal) == "\\x1b[31m\n"


def test_progress_bars_move_the_cursor() -> None:
    with on_terminal() as terminal:
        with tqdm(total=1, file=exact(sys.stderr), ncols=40):
            pass
        assert "\r" in received(terminal) and exact(sys.stdin) is sys.stdin


def test_files_and_pipes_receive_text_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "out").open("w", encoding="utf-8", newline="") as file:
        monkeypatch.setattr(sys, "stdout", file)
        protect_terminal()
        print_on_first_rank(EVIL, World(0, 1, 0, None))
        assert not isinstance(sys.stdout, Terminal)
    assert (tmp_path / "out").read_bytes() == EVIL.encode()


def test_errors_escape_control_characters() -> None:
    assert str(DataError(EVIL)) == visible(EVIL) == SHOWN
