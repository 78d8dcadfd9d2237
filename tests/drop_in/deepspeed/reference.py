"""DeepSpeed itself, in one process that all tests share: importing it takes several seconds.

``ask(task)`` starts the process on the first call. As a program, ``python -m tests.drop_in.deepspeed.reference FD``
runs the tasks that it reads from its input and writes one line of JSON for each to the file descriptor ``FD``.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import select
import subprocess
import sys
import traceback
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
REFERENCE = Path(sys.prefix).resolve() / "reference"
"""DeepSpeed itself, if it is installed for comparison."""
SECONDS = 240.0
"""Time limit of a task."""


@dataclass(frozen=True)
class Task:
    """A call of a function; its module must not import DeepSpeed on another path."""

    function: str
    """``module:name``."""
    arguments: tuple[Any, ...] = ()
    """Values that JSON can represent."""
    ranks: int = 0
    """Number of forked ranks; 0: the process itself."""


def ask(task: Task) -> Any:
    """Run ``task`` with DeepSpeed; return its result (of rank 0) as read from JSON."""
    process, answers = _process()
    assert process.stdin is not None
    process.stdin.write(json.dumps(asdict(task)) + "\n")
    process.stdin.flush()
    if not select.select([answers], [], [], SECONDS)[0]:
        process.kill()
        raise AssertionError(f"{task.function} did not finish within {SECONDS:.0f} s")
    line = answers.readline()
    assert line, f"DeepSpeed's process ended in {task.function}"
    succeeded, found = json.loads(line)
    assert succeeded, found
    return found


@cache
def _process() -> tuple[subprocess.Popen[str], Any]:
    """Start the process; later calls return the same one."""
    reads, writes = os.pipe()
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"PYTHONPATH": f"{REFERENCE}{os.pathsep}{ROOT}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", __name__, str(writes)]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=environment, pass_fds=(writes,)
    )
    os.close(writes)
    atexit.register(process.wait)
    atexit.register(process.kill)  # called first
    return process, os.fdopen(reads)


def run(task: Task) -> Any:
    """Run ``task`` in this process or in ranks forked from it."""
    from megatron_core.verify.ranks import run_ranks

    module_name, _, name = task.function.partition(":")
    module = importlib.import_module(module_name)
    getattr(module, "load", lambda: None)()  # ranks inherit what the parent has imported
    function = getattr(module, name)
    if not task.ranks:
        return function(*task.arguments)
    return run_ranks(task.ranks, function, *task.arguments, backend="gloo")[0]


def main(answers: int) -> None:
    """Run the tasks of the input until it ends."""
    import torch

    import deepspeed
    import deepspeed.utils

    assert REFERENCE in Path(deepspeed.__file__).parents
    torch.set_num_threads(1)
    deepspeed.accelerator.get_accelerator().is_fp16_supported = lambda: True  # else it refuses fp16 on most CPUs
    deepspeed.ops.__compatible_ops__.update(dict.fromkeys(deepspeed.ops.__compatible_ops__, False))  # compile nothing
    with os.fdopen(answers, "w") as out:
        for line in sys.stdin:
            values = json.loads(line)
            try:
                found = [True, run(Task(values["function"], tuple(values["arguments"]), values["ranks"]))]
            except BaseException:
                found = [False, traceback.format_exc()]
            out.write(json.dumps(found, default=lambda array: array.tolist()) + "\n")
            out.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
