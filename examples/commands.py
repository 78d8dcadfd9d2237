"""Run and print the commands of an example."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def launch(title: str, ranks: int, *flags: object) -> None:
    """Run pretrain_gpt.py on ``ranks`` processes of this machine."""
    run(title, "pretrain_gpt.py", "--nproc-per-node", ranks, *flags)


def run(title: str, *arguments: object) -> None:
    """Print a Python command and run it in the clone's folder; exit if it fails."""
    command = [sys.executable, *map(str, arguments)]
    print(f"\n== {title}\n$ {shlex.join(['python', *command[1:]])}", flush=True)
    began = time.monotonic()
    # One thread for each rank, so that ranks that share the cores do not wait for each other's threads.
    environment = os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if status:
        sys.exit(f"the step '{title}' failed with status {status}; see its message above")
    print(f"-- {time.monotonic() - began:.0f} s", flush=True)
