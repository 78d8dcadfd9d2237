"""Layouts of ``make gpu``: several ranks on one simulated GPU, over host memory; and figures of a profiler's trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.gpu import layouts, one_gpu, trace
from benchmarks.gpu.layouts import OVER_HOST, OVER_NCCL, start, transport_of
from benchmarks.gpu.one_gpu import on_one_gpu
from benchmarks.gpu.stages import LAYOUTS, TRACES
from megatron_core.verify.ranks import RankFailure, run_ranks
from tests.simulated_gpu.device import LOG
from tests.simulated_gpu.runtime import simulated_gpu


@pytest.fixture
def one_simulated_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_gpu, "DEVICE", simulated_gpu)


@pytest.mark.drawn(1)
@pytest.mark.parametrize("name", [name for name in LAYOUTS if "graphs" not in name])
def test_layouts_on_one_simulated_gpu(name: str, one_simulated_gpu: None) -> None:
    figures = layouts.measure(name, "cpu", OVER_HOST)
    assert figures["within"], figures
    assert figures["tokens_per_second"] > 0.0 and figures["transport"] == OVER_HOST


def test_verify_on_one_simulated_gpu(one_simulated_gpu: None) -> None:
    figures = layouts.verify("cpu", OVER_HOST)
    assert figures["within"] and len(figures["layouts"]) == 1, figures


def exchanged() -> list[Any]:
    """Each collective over tensors of the device, and what is seen before an asynchronous one is waited for."""
    rank = dist.get_rank()
    device = torch.device("cuda", 0)
    mine = torch.full((2,), rank + 1.0, device=device)
    total = mine.clone()
    handle = dist.all_reduce(total, async_op=True)
    early = total.tolist()
    handle.wait()
    gathered = mine.new_empty(4)
    dist.all_gather_into_tensor(gathered, mine)
    part = mine.new_empty(1)
    dist.reduce_scatter_tensor(part, mine)
    swapped = mine.new_empty(2)
    dist.all_to_all_single(swapped, mine)
    listed = [mine.new_empty(2) for _ in range(2)]
    dist.all_gather(listed, mine)
    largest = mine.clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    dist.broadcast(mine, 1)
    received = mine.new_empty(2)
    if rank == 0:
        dist.isend(gathered[:2], 1).wait()
    else:
        dist.irecv(received, 0).wait()
    on_host = torch.ones(1)
    dist.all_reduce(on_host)
    assert dist.get_backend() == "nccl" and total.is_cuda and listed[1].is_cuda
    values = [early, total, gathered, part, swapped, *listed, largest, mine, received if rank else mine, on_host]
    return [value if isinstance(value, list) else value.tolist() for value in values]


def test_collectives_over_host_memory(one_simulated_gpu: None) -> None:
    first, second = start(OVER_HOST, 2, exchanged)
    assert first[0] == [1.0, 1.0] and second[0] == [2.0, 2.0], "the sum arrives when it is waited for"
    common = [[3.0, 3.0], [1.0, 1.0, 2.0, 2.0], [3.0], [1.0, 2.0], [1.0, 1.0], [2.0, 2.0], [2.0, 2.0], [2.0, 2.0]]
    assert first[1:9] == common
    assert second[1:9] == common
    assert second[9] == [1.0, 1.0] and first[10] == second[10] == [2.0]


def fails_on_one_rank() -> int:
    if dist.get_rank() == 1:
        raise ValueError("the second rank")
    dist.all_reduce(torch.ones(1, device="cuda"))
    return LOG.index


def test_a_rank_that_fails_is_reported(one_simulated_gpu: None) -> None:
    with pytest.raises(RankFailure, match="the second rank"):
        start(OVER_HOST, 2, fails_on_one_rank)


def forked_late() -> None:
    torch.cuda._is_in_bad_fork = lambda: True
    on_one_gpu(dist.get_rank)


def test_a_parent_that_has_used_cuda_is_refused() -> None:
    with pytest.raises(RankFailure, match="fork before the first use of the GPU"):
        run_ranks(1, forked_late)


def test_transports() -> None:
    assert transport_of("cuda", 2) == OVER_NCCL and transport_of("cuda", 1) == OVER_HOST
    assert transport_of("cpu", 0) == layouts.ON_CPU
    assert set(layouts.OVERLAPPED) < set(LAYOUTS) and set(trace.SWITCHES) == set(TRACES[1:])


def event(name: str, category: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": start, "dur": duration}


def test_the_hidden_share_of_transfers() -> None:
    steps = 1e3 * trace.STEPS
    events = [
        event("gemm", "kernel", 0.0, 2 * steps),
        event("ncclDevKernel_AllReduce", "kernel", steps, 2 * steps),
        event("norm", "kernel", 1.5 * steps, steps),
        event("Memcpy DtoD", "gpu_memcpy", 0.0, 9 * steps),
        event("cudaLaunchKernel", "cuda_runtime", 2 * steps, steps),
    ]
    assert trace.overlap(events, "nccl") == {"transfers_ms": 2.0, "hidden": pytest.approx(0.75)}
    assert trace.overlap(events[:1], "nccl") == {"transfers_ms": 0.0, "hidden": 0.0}
    assert trace.overlap(events, "Memcpy (HtoD|DtoD)")["hidden"] == pytest.approx(3 / 9)


def test_launches_and_waits_of_a_trace() -> None:
    calls = ("cudaLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaMemsetAsync", "cudaGraphLaunch")
    waiting = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize", "cudaMalloc", "cudaMemcpy")
    neither = ("cudaEventRecord", "cudaStreamWaitEvent", "aten::mm", "cudaEventQuery")
    events = [event(name, "cuda_runtime", 0.0, 1.0) for name in (*calls, *waiting, *neither)]
    assert trace.launches(events, "cuda") == len(calls)
    assert trace.waits(events) == dict.fromkeys(waiting, 1)


def test_launches_of_a_real_trace(tmp_path: Path) -> None:
    figures = trace.count_launches("cpu")
    assert figures["counted"] == "operators"
    assert 50 < figures["launches_per_layer"] < 1000 and figures["launches_besides_layers"] > 0
    json.dumps(figures)
