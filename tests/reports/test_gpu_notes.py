"""Nodes of ranks, and the report of tensor parallelism between nodes."""

from __future__ import annotations

import pytest
import torch

from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.reports import gpu_notes as gpu_notes_module
from megatron_core.reports.gpu_notes import (
    describe_allocator,
    gpu_notes,
    gpu_state,
    nodes_of,
    ranks_per_node,
    tensor_parallel_notes,
)
from tests.runs import tiny_run
from tests.simulated_gpu import runtime
from tests.simulated_gpu.runtime import simulated_gpu


def test_ranks_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert ranks_per_node(16) == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert ranks_per_node(16) == 8
    assert nodes_of([6, 7, 8, 23], 8) == [0, 1, 2]


def test_tensor_parallelism_between_nodes_is_reported_with_its_cost() -> None:
    """16 ranks in each group: 4 all-reduces of 64 MiB send 4 x 2 x 15/16 x 64 MiB."""
    groups = ParallelGroups(Grid(tp=16, dp=2), 0)
    [note] = tensor_parallel_notes(groups, 8, 64 * 2**20, messages=4)
    assert "tensor_model_parallel_size=16 spans 2 nodes of 8 ranks" in note
    assert "sends 480 MiB, 10 ms at 50 GB/s" in note and "1.1 ms at 450 GB/s" in note and "use at most 8" in note
    assert not list(tensor_parallel_notes(ParallelGroups(Grid(tp=8, dp=4), 0), 8, 1.0, messages=4))
    assert not list(tensor_parallel_notes(groups, 16, 1.0, messages=4)), "one node of 16 GPUs"


def test_a_run_on_one_node_has_no_such_note() -> None:
    run = tiny_run()
    assert not list(gpu_notes(run.config, run.groups, run.world.device))


def test_fragments_and_retries_of_the_allocator_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", 0)
    with simulated_gpu():
        assert describe_allocator(device) == "allocator: peak of 2.00 GiB reserved, 25% of it fragments; 0 retries"
        monkeypatch.setitem(runtime.ALLOCATOR, "num_alloc_retries", 3)
        assert "3 retries, each of which waited for the whole device; use PYTORCH" in describe_allocator(device)


def test_the_state_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu_state(torch.device("cpu")) == {}
    device = torch.device("cuda", 0)
    with simulated_gpu():
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2**22)
        state = gpu_state(device)
        assert state["reserved"] == 2**22 and state["fragments"] == 0.75
        monkeypatch.setattr(gpu_notes_module, "find_spec", lambda name: object())
        monkeypatch.setattr(torch.cuda, "utilization", lambda device: 40)
        assert gpu_state(device)["busy"] == 0.4

        def fails(device: object) -> int:
            raise OSError("NVML is not there")

        monkeypatch.setattr(torch.cuda, "utilization", fails)
        assert "busy" not in gpu_state(device)
