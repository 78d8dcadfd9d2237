"""Helpers that Megatron Core's users know by name."""

from __future__ import annotations

import pytest
import torch

from megatron.core import parallel_state as mpu
from megatron.core.tensor_parallel import (
    VocabUtility,
    broadcast_data,
    gather_split_1d_tensor,
    split_tensor_along_last_dim,
    split_tensor_into_1d_equal_chunks,
)
from megatron.core.tensor_parallel.random import (
    CudaRNGStatesTracker,
    get_cuda_rng_tracker,
    model_parallel_cuda_manual_seed,
)
from megatron_core import parallel_state
from megatron_core.errors import ConfigError, DataError, LayoutError
from megatron_core.verify.ranks import run_ranks


def test_rank_generator_lists_megatrons_groups() -> None:
    generator = mpu.RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-dp-pp")
    assert generator.get_ranks("tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert generator.get_ranks("dp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert generator.get_ranks("pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert generator.get_ranks("tp-pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    masked = mpu.generate_masked_orthogonal_rank_groups(8, [2, 2, 2], [False, True, False])
    assert masked == generator.get_ranks("dp")


def _broadcast() -> list[list[int]]:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    data = {"a": torch.arange(6).view(2, 3), "b": torch.arange(4), "c": torch.tensor(9)}
    first = parallel_state.get_tensor_model_parallel_rank() == 0
    offset = 100 * parallel_state.get_data_parallel_rank()
    mine = {key: value + offset for key, value in data.items()} if first else None
    received = broadcast_data(["a", "b", "c"], mine, torch.int64)
    for key, value in data.items():
        assert torch.equal(received[key], value + offset), key
    if first:
        with pytest.raises(DataError, match=r"a is .*int64"):
            broadcast_data(["a"], mine, torch.float32)
    chunk = split_tensor_into_1d_equal_chunks(data["a"])
    assert torch.equal(gather_split_1d_tensor(chunk), torch.arange(6))
    model_parallel_cuda_manual_seed(123)
    with get_cuda_rng_tracker().fork():
        split = torch.rand(1).item()
    shared = torch.rand(1).item()
    return [split, shared]


def test_broadcast_split_and_streams() -> None:
    results = run_ranks(4, _broadcast)
    assert len({split for split, _ in results}) == 2  # one stream for each of the two tensor-parallel ranks
    assert len({shared for _, shared in results}) == 1


def test_split_along_the_last_dim() -> None:
    tensor = torch.arange(12.0).view(2, 6)
    parts = split_tensor_along_last_dim(tensor, 3)
    assert torch.equal(torch.cat(parts, dim=-1), tensor)
    assert not parts[0].is_contiguous()
    assert split_tensor_along_last_dim(tensor, 3, contiguous_split_chunks=True)[0].is_contiguous()
    with pytest.raises(LayoutError, match="6 is not divisible by 4"):
        split_tensor_along_last_dim(tensor, 4)


def test_vocabulary_ranges() -> None:
    assert VocabUtility.vocab_range_from_global_vocab_size(100, 1, 4) == (25, 50)
    assert VocabUtility.vocab_range_from_per_partition_vocab_size(25, 3, 4) == (75, 100)


def test_streams_go_on_where_they_were_left() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("mine", 5)
    outside = torch.get_rng_state()
    with tracker.fork("mine"):
        first = torch.rand(2)
    states = tracker.get_states()
    with tracker.fork("mine"):
        second = torch.rand(2)
    assert torch.equal(torch.get_rng_state(), outside)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(2), first)
    assert torch.equal(torch.rand(2), second)
    tracker.set_states(states)
    with tracker.fork("mine"):
        assert torch.equal(torch.rand(2), second)


def test_wrong_streams_are_named() -> None:
    tracker = CudaRNGStatesTracker()
    tracker.add("mine", 5)
    with pytest.raises(ConfigError, match="'mine' already exists"):
        tracker.add("mine", 6)
    with pytest.raises(ConfigError, match="seed=5"):
        tracker.add("other", 5)
    with pytest.raises(ConfigError, match=r"no generator state 'other'; known: mine"), tracker.fork("other"):
        raise AssertionError("the context must not be entered")
