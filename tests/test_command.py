"""The end of programs: Ctrl-C at any time, closed and full outputs, user errors."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from megatron_core.command import INTERRUPTED
from megatron_core.commands.start import run_tool, status_of
from megatron_core.errors import DataError

ROOT = Path(__file__).parents[1]


def test_ctrl_c_while_a_program_imports() -> None:
    code = (
        "import time; from megatron_core.commands.start import end_on_interrupt; "
        "end_on_interrupt(); print(1, flush=True)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", f"{code}; time.sleep(60)"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "1\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == INTERRUPTED and process.stderr.read() == ""


@pytest.mark.parametrize("error", ["ImportError('libx.so: cannot map')", "MemoryError()", "SystemError('NULL')"])
def test_a_library_that_cannot_be_loaded_is_one_sentence(error: str) -> None:
    code = f"from megatron_core.commands.start import end_on_interrupt; end_on_interrupt(); raise {error}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "a library cannot be loaded" in done.stderr and "ulimit -v" in done.stderr


def test_faults_of_our_own_keep_their_traceback() -> None:
    for begin, error in (("", "ValueError(1)"), ("begin_program(); ", "ImportError('x')")):
        code = "from megatron_core.command import begin_program; "
        code += "from megatron_core.commands.start import end_on_interrupt; end_on_interrupt(); "
        done = subprocess.run([sys.executable, "-c", f"{code}{begin}raise {error}"], cwd=ROOT, stderr=subprocess.PIPE)
        assert done.returncode == 1 and b"Traceback" in done.stderr


def test_ctrl_c_while_a_program_ends() -> None:
    code = """
import atexit, os, signal, time
from megatron_core.commands.start import end_on_interrupt, run_tool
atexit.register(lambda: (os.kill(os.getpid(), signal.SIGINT), time.sleep(60)))
end_on_interrupt()
run_tool("name", lambda: print("done"))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (INTERRUPTED, "done\n", "")


def _raise(error: BaseException) -> Callable[[], int]:
    def tool() -> int:
        raise error

    return tool


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        (lambda: None, None),
        (lambda: 3, 3),
        (_raise(DataError("x is wrong")), "name: x is wrong"),
        (_raise(OSError(28, "No space left on device", "f")), "name: [Errno 28] No space left on device: 'f'"),
        (_raise(BrokenPipeError(32, "Broken pipe")), 1),
        (partial(status_of, _raise(BrokenPipeError(32, "Broken pipe"))), 1),
        (_raise(KeyboardInterrupt()), INTERRUPTED),
        (_raise(MemoryError()), "name: out of memory; use smaller sizes, or a machine with more memory"),
    ],
)
def test_exit_status(tool: Callable[[], int], code: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_core.commands.start.discard", lambda stream: None)  # belongs to pytest
    with pytest.raises(SystemExit) as end:
        run_tool("name", tool)
    assert end.value.code == code


@pytest.mark.parametrize(("to", "said"), [("/dev/full", "name: [Errno 28]"), ("closed", "")])
def test_an_output_that_cannot_be_written(to: str, said: str) -> None:
    """Also if Python itself flushes it, at the end."""
    code = "from megatron_core.commands.start import run_tool; run_tool('name', lambda: print('x' * 10000))"
    head = "exec 3>&1; { " + f'{sys.executable} -c "{code}"; echo status $? >&3; }} '
    script = head + ("> /dev/full" if to == "/dev/full" else "| true")
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "status 1\n" or (to == "closed" and done.stdout == "status 0\n")
    assert done.stderr.startswith(said) and done.stderr.count("\n") == (1 if said else 0)


def test_names_that_are_no_utf_8_can_be_printed() -> None:
    code = "from megatron_core.commands.start import run_tool; run_tool('name', lambda: print(chr(0xdcff)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\udcff\n", "")


def test_streams_that_are_closed_from_the_start() -> None:
    code = (
        "import sys; from megatron_core.commands.start import run_tool; "
        "run_tool('name', lambda: sys.stdout.write('x') - 1)"
    )
    done = subprocess.run(["bash", "-c", f'{sys.executable} -c "{code}" >&-'], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
