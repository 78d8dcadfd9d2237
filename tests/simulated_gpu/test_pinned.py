"""Pinned host memory on the simulated GPU: its size, its end, and the thread that allocates it."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from megatron_core.checkpoint.boxes import Box, TensorBox
from megatron_core.features.background_saves.snapshot import Snapshot
from megatron_core.features.offload.placement import HostPlacement
from megatron_core.parallel import pinned
from megatron_core.parallel.pinned import pinned_bytes, pinned_like
from tests.simulated_gpu.device import LOG
from tests.simulated_gpu.runtime import simulated_gpu


@pytest.mark.parametrize("size", [pinned.REGISTERED_FROM, 5 * 2**20 + 12_345, 9 * 2**20])
def test_sizes_are_not_rounded_to_powers_of_two(size: int) -> None:
    with simulated_gpu():
        memory = pinned_bytes(size)
        assert memory.numel() == size and memory.is_pinned() and not memory.any()
        [registered] = LOG.registered.values()
        assert size <= registered < size + pinned.PAGE
        del memory
        gc.collect()
        assert not LOG.registered, "freed memory is no longer registered"


def test_small_memory_is_that_of_torch() -> None:
    with simulated_gpu():
        assert pinned_bytes(4096).is_pinned() and not LOG.registered


def test_offloaded_state_is_pinned_in_its_size() -> None:
    with simulated_gpu():
        state = HostPlacement(torch.device("cuda", 0)).tensor("exp_avg", 3 * 2**18 + 1, torch.float32)
        assert state.dtype == torch.float32 and state.is_pinned() and not state.any()
        assert sum(LOG.registered.values()) < 4 * state.numel() + pinned.PAGE


def test_gradients_are_sent_to_memory_of_their_size() -> None:
    with simulated_gpu():
        grad = torch.ones(5 * 2**18 + 1, device="cuda")
        memory = pinned_like(grad)
        assert memory.shape == grad.shape and memory.dtype == grad.dtype and memory.is_pinned()
        assert sum(LOG.registered.values()) < grad.nbytes + pinned.PAGE


def _pieces(count: int) -> list[TensorBox]:
    shape = (2**18 + 7,)
    memory = [torch.full(shape, float(number), device="cuda") for number in range(count)]
    return [
        TensorBox(f"weight{number}", shape, Box((0,), shape), each, owned=True) for number, each in enumerate(memory)
    ]


def test_the_buffer_of_a_background_save_is_allocated_by_a_thread(tmp_path: Path) -> None:
    """Locking pages takes seconds, in which the main thread would not launch kernels."""
    with simulated_gpu():
        pieces, snapshot = _pieces(3), Snapshot()
        snapshot.reserve(pieces)
        copies, complete = snapshot.take(pieces[:2], pieces[2:])
        complete()
        torch.cuda.synchronize()
        assert [copy.memory.unique().tolist() for copy in copies] == [[0.0], [1.0], [2.0]]
        assert LOG.allocating == [False]
