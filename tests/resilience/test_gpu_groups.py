"""Recovery on a simulated GPU: communicators are aborted in time, or the process is replaced."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_core.cpu_ranks import interrupt
from megatron_core.errors import LayoutError
from megatron_core.parallel import World
from megatron_core.parallel.exit_status import RESTART
from megatron_core.resilience import gpu_groups
from megatron_core.resilience.gpu_groups import obstacle_to_reuse, prepare_gpu, replace_process
from megatron_core.resilience.processes import monitor
from megatron_core.verify.ranks import run_ranks
from tests.simulated_gpu.device import LOG
from tests.simulated_gpu.runtime import simulated_gpu

GPU = torch.device("cuda", 0)


def abort_and_join_again(store_file: str) -> list[Any]:
    """The ranks abort their groups, find the device usable, join again, and sum."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    aborted: list[int] = []

    def abort() -> None:
        aborted.append(len(dist.distributed_c10d._world.pg_map))
        dist.destroy_process_group()

    dist.new_group([0, 1])
    with simulated_gpu():
        dist.distributed_c10d._abort_process_group = abort
        reason = obstacle_to_reuse(GPU)
        has_waited = any("device" in line for line in LOG.stalls)
    remains = dist.is_initialized()
    dist.init_process_group("gloo", store=dist.FileStore(store_file, size), rank=rank, world_size=size)
    total = torch.full((1,), rank + 1.0)
    dist.all_reduce(total)
    return [reason, aborted, has_waited, remains, total.item()]


def test_communicators_are_aborted_and_made_again(tmp_path: Path) -> None:
    results = run_ranks(2, abort_and_join_again, str(tmp_path / "store"))
    assert results == [[None, [2], True, False, 3.0]] * 2


def test_a_cpu_has_nothing_to_release() -> None:
    assert obstacle_to_reuse(torch.device("cpu")) is None


def fails(error: Exception) -> Any:
    def call(*_: object) -> None:
        raise error

    return call


def with_abort(abort: Any) -> tuple[str | None, float]:
    """The reason after ``abort``, and the seconds until it is known."""
    began = time.monotonic()
    with simulated_gpu():
        dist.distributed_c10d._abort_process_group = abort
        gpu_groups.ABORT_SECONDS = 0.3
        return obstacle_to_reuse(GPU), time.monotonic() - began


def test_an_abort_that_hangs_is_left() -> None:
    [(reason, seconds)] = run_ranks(1, with_abort, lambda: time.sleep(60))
    assert reason == "aborting NCCL's communicators did not end within 0.3 s"
    assert seconds < 5.0


def test_an_abort_that_fails_names_the_error() -> None:
    [(reason, _)] = run_ranks(1, with_abort, fails(RuntimeError("NCCL error: unhandled\nmore")))
    assert reason == "the GPU or its communicators are not usable: NCCL error: unhandled"


def with_broken_device() -> str | None:
    with simulated_gpu():
        dist.distributed_c10d._abort_process_group = lambda: None
        torch.cuda.synchronize = fails(RuntimeError("CUDA error: an illegal memory access was encountered"))
        return obstacle_to_reuse(GPU)


def test_an_error_of_the_device_is_an_obstacle() -> None:
    [reason] = run_ranks(1, with_broken_device)
    assert reason is not None and reason.endswith("CUDA error: an illegal memory access was encountered")


def test_the_process_is_replaced_with_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    replace_process("[rank 1]", "rank 1 is replaced by a new process: \x1b[31mred")
    assert statuses == [RESTART]
    text = capsys.readouterr().err
    assert text.startswith("[rank 1] note: rank 1 is replaced by a new process: ") and "\x1b" not in text


def test_the_forked_process_is_prepared(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    prepare_gpu(World(0, 2, 0, torch.device("cpu")))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3" and not capsys.readouterr().err
    prepare_gpu(World(0, 2, 0, GPU))
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert "has not been tested on GPUs yet" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    with pytest.raises(LayoutError, match="PYTORCH_NVML_BASED_CUDA_CHECK=1"):
        prepare_gpu(World(0, 2, 0, GPU))


def test_an_abort_that_hangs_does_not_keep_the_monitor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exception is raised in the main thread although the abort never returns."""
    release = threading.Event()
    monkeypatch.setattr(monitor, "abort_groups", release.wait)
    monkeypatch.setattr(monitor, "GRACE", 0.1)
    failure = SimpleNamespace(what="rank 1 was killed")
    rendezvous = SimpleNamespace(rank=0, failure=lambda generation: failure, ended=lambda: None)
    watching = monitor.Monitor(rendezvous, SimpleNamespace(numbers=[0] * 16), 60.0)  # type: ignore[arg-type]
    try:
        with pytest.raises(interrupt.InterruptedWait):
            watching.watch(1)
            for _ in range(400):
                time.sleep(0.01)
    finally:
        watching.pause()
        interrupt.withdraw()
        release.set()
