"""Runs the programs of this project in this process, because starting Python and loading torch takes seconds."""

from __future__ import annotations

import io
import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from unittest.mock import patch

ROOT = Path(__file__).parents[1]


def run_program(path: str, *flags: object, cwd: Path = ROOT) -> CompletedProcess[str]:
    """``python path flags`` in ``cwd``: exit status and output. ``path`` is relative to the repository."""
    arguments, before = [path, *map(str, flags)], Path.cwd()
    status: object = 0
    out, errors = io.StringIO(), io.StringIO()
    with patch.object(sys, "argv", arguments), redirect_stdout(out), redirect_stderr(errors):
        os.chdir(cwd)
        try:
            runpy.run_path(str(ROOT / path), run_name="__main__")
        except SystemExit as end:
            status = end.code or 0
        finally:
            os.chdir(before)
    if isinstance(status, str):
        status = print(status, file=errors) or 1
    return CompletedProcess(arguments, int(status), out.getvalue(), errors.getvalue())
