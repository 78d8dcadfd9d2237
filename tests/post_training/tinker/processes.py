"""The server in processes of its own, forks of the tests' process, and the client of PyPI."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.programs import ForkedPopen
from tests.training.trl_1_16.inputs import load_model, save_inputs

SETTINGS: dict[str, Any] = {
    "seq_length": 48,
    "micro_batch_size": 2,
    "fp64": True,
    "kernel_backend": "reference",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one process": {},
    "tp2 sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2 zero3": {"zero_stage": 3},
}
NAME = "tiny"


def save_model(folder: Path) -> None:
    """A tiny GPT-2 in float64 with its tokenizer, whose logits are large enough for adapters to choose a token."""
    save_inputs(folder)
    model = load_model(folder)
    with torch.no_grad():
        model.transformer.wte.weight.mul_(4.0)
    model.save_pretrained(folder)


def words_of(settings: dict[str, Any]) -> list[str]:
    """The flags of settings."""
    words: list[str] = []
    for name, value in settings.items():
        words.append(f"--{name.replace('_', '-')}")
        words += [] if value is True else [str(value)]
    return words


@contextmanager
def server_of(folder: Path, *, ranks: int = 1, processes: list[int] | None = None, **settings: Any) -> Iterator[str]:
    """Start the server on a free port; yield its address, and end it.

    ``processes`` receives the id of its process group, which the test then kills itself.
    """
    flags = {**SETTINGS, "load_hf": folder, "model_name": NAME, "port": 0, **settings}
    command = "megatron_core.commands.post_train"
    # --nproc-per-node would start another process of Python.
    words = ["megatron_core.commands.start_ranks", str(ranks), command] if ranks > 1 else [command]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with ForkedPopen(
        [sys.executable, "-m", *words, *words_of(flags)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=processes is not None,
    ) as process:
        if processes is not None:
            processes.append(process.pid)
        try:
            assert process.stdout is not None
            lines: list[str] = []
            for line in process.stdout:
                lines.append(line)
                if address := re.search(r"listening at (http://\S+),", line):
                    yield address[1]
                    break
            else:
                raise AssertionError("the server ended:\n" + "".join(lines))
        finally:
            process.terminate()
            output, _ = process.communicate(timeout=60)
            print(output)
    ends = (0, -15, 143) if processes is None else (-9,)
    assert process.returncode in ends, output
