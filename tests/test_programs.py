"""Programs of tests as forks behave as processes of their own; their processor time is that of the test."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from subprocess import PIPE, STDOUT
from types import SimpleNamespace
from typing import Any

import pytest

from tests.costs import PHASES, Costs
from tests.programs import ForkedPopen

REPORT = """
import atexit, os, sys
atexit.register(print, "the end")
print(sys.argv[1:], os.getcwd(), os.environ.get("ONLY"), "PATH" in os.environ, os.getsid(0) == os.getpid())
print("an error", file=sys.stderr)
sys.exit(int(sys.stdin.readline()))
"""


def started(folder: Path, code: str, *words: str, **options: Any) -> ForkedPopen:
    """A program with this code."""
    program = folder / "program.py"
    program.write_text(code)
    return ForkedPopen([sys.executable, str(program), *words], stdout=PIPE, text=True, **options)


def test_a_program_has_its_streams_environment_and_status(tmp_path: Path) -> None:
    options: dict[str, Any] = {"stdin": PIPE, "stderr": PIPE, "cwd": tmp_path, "env": {"ONLY": "this"}}
    with started(tmp_path, REPORT, "--flag", start_new_session=True, **options) as process:
        output, errors = process.communicate("7\n", timeout=60)
    assert (process.returncode, errors) == (7, "an error\n")
    assert output == f"['--flag'] {tmp_path} this False True\nthe end\n"


def test_an_exception_is_a_status_and_a_traceback(tmp_path: Path) -> None:
    with started(tmp_path, "raise ValueError('the 7th')", stderr=STDOUT) as process:
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 1 and output.endswith("ValueError: the 7th\n")


def test_a_signal_ends_a_program(tmp_path: Path) -> None:
    with started(tmp_path, "import time; print('ready', flush=True); time.sleep(60)") as process:
        assert process.stdout.readline() == "ready\n"
        process.terminate()
        assert process.wait(timeout=60) == -signal.SIGTERM


def test_the_costs_of_a_test_are_those_of_its_programs_and_waits(tmp_path: Path) -> None:
    costs, test = Costs(), SimpleNamespace(nodeid="file::test")
    costs.of_test[test.nodeid] = [[0.0, 0.0] for _ in PHASES]
    measured = costs._measured(test, "call")
    next(measured)
    with started(tmp_path, "import time\nwhile time.process_time() < 0.3: pass"):
        pass
    time.sleep(0.2)
    with pytest.raises(StopIteration):
        measured.send(None)
    processor, waits = costs.of_test[test.nodeid][PHASES.index("call")]
    assert 0.25 < processor < 5.0 and waits > 0.1
