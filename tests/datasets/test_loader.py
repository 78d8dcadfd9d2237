"""Micro-batches: the same samples for any layout, history and number of workers."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_core.datasets import BlendedDataset, Dataset, IndexedDataset, KeyedGPTDataset, MockDataset
from megatron_core.datasets.loader import Batch, BatchLoader
from megatron_core.errors import ConfigError, DataError
from tests.datasets.files import FakeIndexed, write_counting

LENGTH = 8


@pytest.fixture
def dataset() -> BlendedDataset:
    """A blend of two small data sets with 24 and 37 samples per epoch."""
    made = [KeyedGPTDataset(FakeIndexed([n]), range(1), LENGTH, seed=4) for n in (200, 300)]
    return BlendedDataset(made, [1, 2])


def global_batches(
    dataset: Dataset, sizes: Iterator[tuple[int, int]] | list[tuple[int, int]], global_batch: int
) -> Iterator[list[tuple[int, tuple[int, ...]]]]:
    """(sample index, tokens) of each step's samples, sorted; `sizes` are (dp, micro-batch size) by step."""
    for step, (size, micro) in enumerate(sizes):
        seen = []
        for rank in range(size):
            loader = BatchLoader(dataset, micro, rank, size, vocab_size=1000)
            for batch in loader.step(step * global_batch, global_batch // (size * micro)):
                rows = zip(batch["sample_index"].tolist(), batch["tokens"].tolist(), strict=True)
                seen += [(index, tuple(tokens)) for index, tokens in rows]
        yield sorted(seen)


def equal(a: list[Batch], b: list[Batch]) -> bool:
    """Whether two steps hold the same tensors."""
    return len(a) == len(b) and all(
        x.keys() == y.keys() and all(torch.equal(x[key], y[key]) for key in x) for x, y in zip(a, b, strict=True)
    )


def test_shapes_and_dtypes(dataset: BlendedDataset) -> None:
    (batch,) = BatchLoader(dataset, 3, 0, 1, vocab_size=1000).step(6, 1)
    shapes = {key: (tuple(value.shape), value.dtype) for key, value in batch.items()}
    ids = ((3, LENGTH), torch.int64)
    assert shapes == {
        "tokens": ids,
        "labels": ids,
        "loss_mask": ((3, LENGTH), torch.float32),
        "sample_index": ((3,), torch.int64),
        "source": ((3,), torch.int64),
    }
    assert batch["sample_index"].tolist() == [6, 7, 8]
    assert batch["tokens"][1].tolist() == dataset[7]["tokens"].tolist()
    assert all(value.is_contiguous() for value in batch.values())


def test_who_gets_which_sample(dataset: BlendedDataset) -> None:
    loader = BatchLoader(dataset, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=3, vocab_size=1000)
    indices = [batch["sample_index"].tolist() for batch in loader.step(100, 2)]
    assert indices == [[102, 103], [108, 109]]


@pytest.mark.parametrize(("size", "micro"), [(1, 2), (2, 1), (2, 4), (4, 2), (8, 1)])
def test_a_global_batch_is_the_same_for_any_layout(size: int, micro: int, dataset: BlendedDataset) -> None:
    steps = 30  # more than three epochs of the smaller data set
    alone = list(global_batches(dataset, [(1, 8)] * steps, 8))
    assert list(global_batches(dataset, [(size, micro)] * steps, 8)) == alone  # C31
    assert [index for batch in alone for index, _ in batch] == list(range(8 * steps))


def test_dp_may_change_on_the_way(dataset: BlendedDataset) -> None:
    alone = list(global_batches(dataset, [(1, 8)] * 12, 8))
    changing = [(4, 1)] * 4 + [(2, 2)] * 4 + [(8, 1)] * 4
    assert list(global_batches(dataset, changing, 8)) == alone  # C31


def test_every_sample_once_an_epoch_with_a_resume(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", [100, 93]))
    n = KeyedGPTDataset(indexed, range(2), LENGTH, seed=4).samples_per_epoch
    assert n == 24
    log: list[int] = []
    for resumed_at in (0, n + n // 2):  # an interruption in the middle of the second epoch, continued with new objects
        loader = BatchLoader(KeyedGPTDataset(indexed, range(2), LENGTH, seed=4), 4, 0, 1, vocab_size=1000)
        stop = n + n // 2 if resumed_at == 0 else 3 * n
        for consumed in range(resumed_at, stop, 4):
            log += loader.step(consumed, 1)[0]["tokens"][:, 0].tolist()
    epochs = [log[k * n : (k + 1) * n] for k in range(3)]
    assert all(sorted(epoch) == list(range(0, LENGTH * n, LENGTH)) for epoch in epochs)  # C30
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_history_does_not_count(dataset: BlendedDataset) -> None:
    walked = BatchLoader(dataset, 2, 1, 2, vocab_size=1000)
    steps = [walked.step(consumed, 2) for consumed in range(0, 80, 8)]
    for number in (9, 3, 3, 0):
        fresh = BatchLoader(dataset, 2, 1, 2, vocab_size=1000)
        assert equal(fresh.step(number * 8, 2), steps[number])  # C30
        assert equal(walked.step(number * 8, 2), steps[number])


def test_reading_ahead_changes_nothing(dataset: BlendedDataset) -> None:
    plain = BatchLoader(dataset, 2, 0, 2, vocab_size=1000)
    ahead = BatchLoader(dataset, 2, 0, 2, vocab_size=1000)
    ahead.prefetch(0, 2)
    for consumed in range(0, 40, 8):
        batches = ahead.step(consumed, 2)
        ahead.prefetch(consumed + 8, 2)
        assert equal(batches, plain.step(consumed, 2))
    assert equal(ahead.step(800, 3), plain.step(800, 3))
    assert equal(ahead.step(40, 2), plain.step(40, 2))


def generators() -> tuple[object, ...]:
    """The state of every global random generator."""
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


def test_no_global_generator_is_read(dataset: BlendedDataset) -> None:
    before = generators()
    loader = BatchLoader(dataset, 2, 0, 2, vocab_size=1000)
    loader.prefetch(0, 2)
    first = loader.step(0, 2)
    BatchLoader(MockDataset(50, LENGTH, 1), 2, 0, 2, vocab_size=50).step(0, 2)
    assert generators() == before  # C29
    torch.manual_seed(99)
    assert equal(loader.step(0, 2), first)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_token_outside_the_vocabulary(ahead: bool) -> None:
    loader = BatchLoader(MockDataset(50, LENGTH, 1), 8, 0, 1, vocab_size=20)
    if ahead:
        loader.prefetch(0, 4)
    with pytest.raises(DataError, match=r"token id \d+ in samples 0 to 7 .* of 20 tokens; .*--tokenizer-model"):
        loader.step(0, 4)


def test_a_label_and_a_negative_id_are_checked_too() -> None:
    class Last:
        sequence_length = 2

        def __init__(self, label: int) -> None:
            self.label = label

        def __getitem__(self, index: int) -> dict[str, np.ndarray]:
            return {
                "tokens": np.array([0, 1]),
                "labels": np.array([1, self.label]),
                "loss_mask": np.ones(2, dtype=np.float32),
            }

    for label in (7, -1):
        with pytest.raises(DataError, match=f"token id {label} in samples 0 to 0"):
            BatchLoader(Last(label), 1, 0, 1, vocab_size=7).step(0, 1)


@pytest.mark.parametrize(("micro", "rank", "size"), [(0, 0, 1), (1, 1, 1), (1, -1, 2)])
def test_places_that_are_none(micro: int, rank: int, size: int) -> None:
    with pytest.raises(ConfigError, match="micro_batch_size"):
        BatchLoader(MockDataset(50, LENGTH, 1), micro, rank, size, vocab_size=50)


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_any_number_of_workers_reads_the_same(workers: int, dataset: BlendedDataset) -> None:
    loader = BatchLoader(dataset, 2, 1, 2, vocab_size=1000, num_workers=workers)
    plain = BatchLoader(dataset, 2, 1, 2, vocab_size=1000, num_workers=0)
    for consumed in (0, 12, 24):
        loader.prefetch(consumed, 3)
        assert equal(loader.step(consumed, 3), plain.step(consumed, 3))


def test_shorter_sequences_are_the_beginnings_of_the_long_ones(dataset: BlendedDataset) -> None:
    loader = BatchLoader(dataset, 2, 0, 1, vocab_size=1000)
    loader.prefetch(4, 2)  # full length, which was not prefetched
    for short, full in zip(loader.step(4, 2, 3), loader.step(4, 2), strict=True):
        for key in ("tokens", "labels", "loss_mask"):
            assert torch.equal(short[key], full[key][:, :3])
        assert torch.equal(short["sample_index"], full["sample_index"])
