"""Samples in Megatron's order: tokens, masks, files, and the end of the order."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from megatron_core.datasets import Dataset, IndexedDataset
from megatron_core.datasets.loader import BatchLoader
from megatron_core.errors import ConfigError, DataError
from megatron_core.features.megatron_order.build import build_megatron_order
from megatron_core.features.megatron_order.order import samples_wanted
from tests.datasets.files import FakeIndexed, write, write_counting
from tests.features.megatron_order import reference

LENGTHS = [17, 3, 0, 40, 12, 9, 25, 1, 30, 8]


def texts(lengths: list[int], start: int = 0) -> list[list[int]]:
    """The documents that `write_counting` writes."""
    ends = np.cumsum([start, *lengths]).tolist()
    return [list(range(a, b)) for a, b in pairwise(ends)]


def expected_samples(documents: list[list[int]], length: int, num_samples: int | None, seed: int) -> list[list[int]]:
    """The L + 1 tokens of each sample, from the concatenated documents."""
    lengths = [len(document) for document in documents]
    order, _, shuffle, *_ = reference.indices(lengths, range(len(lengths)), length, num_samples, seed)
    stream = [token for number in order for token in documents[number]]
    return [stream[number * length : number * length + length + 1] for number in shuffle]


def read(dataset: Dataset, count: int) -> list[list[int]]:
    """The tokens and the last label of the first items."""
    samples = [dataset[i] for i in range(count)]
    return [[*sample["tokens"].tolist(), int(sample["labels"][-1])] for sample in samples]


@pytest.mark.parametrize("num_samples", [None, 10, 18, 30, 100])
def test_samples_are_cut_from_the_shuffled_documents(num_samples: int | None, tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", LENGTHS))
    dataset = build_megatron_order([indexed], [range(10)], None, num_samples, 8, seed=7)
    expected = expected_samples(texts(LENGTHS), 8, num_samples, 7)
    assert len(dataset) == len(expected) >= (num_samples or 18)
    assert read(dataset, len(dataset)) == expected
    sample = dataset[0]
    assert sample["labels"][:-1].tolist() == sample["tokens"][1:].tolist()
    assert sample["loss_mask"].tolist() == [1.0] * 8
    assert (sample["tokens"].dtype, sample["labels"].dtype, sample["loss_mask"].dtype) == (
        np.int64,
        np.int64,
        np.float32,
    )


def test_a_range_of_the_sequences(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", LENGTHS))
    dataset = build_megatron_order([indexed], [range(3, 7)], None, 15, 4, seed=1)
    assert read(dataset, 15) == expected_samples(texts(LENGTHS)[3:7], 4, 15, 1)[:15]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_weighted_blend(threads: int, tmp_path: Path) -> None:
    files = [LENGTHS, [50, 50], [9, 31, 22]]
    indexed = [IndexedDataset(write_counting(tmp_path / str(n), file, 1000 * n)) for n, file in enumerate(files)]
    ranges = [range(len(file)) for file in files]
    dataset = build_megatron_order(indexed, ranges, [3, 2, 5], 101, 4, seed=5, threads=threads)
    # ceil(101 w) = 31, 21, 51, in sum 103; and with half a percent more 32, 22, 52.
    parts = [
        expected_samples(texts(file, 1000 * n), 4, asked, 5)
        for n, (file, asked) in enumerate(zip(files, [32, 22, 52], strict=True))
    ]
    chosen, numbers = reference.blend([0.3, 0.2, 0.5], 103)
    assert len(dataset) == 103
    assert read(dataset, 103) == [parts[d][i] for d, i in zip(chosen, numbers, strict=True)]


def test_weights_are_normalised_twice(tmp_path: Path) -> None:
    indexed = [IndexedDataset(write_counting(tmp_path / str(n), [50])) for n in range(3)]
    weights = [1.0, 2.0, 7.3]
    once = (np.array(weights) / np.sum(np.array(weights))).tolist()
    twice = (np.array(once) / np.sum(np.array(once))).tolist()
    assert once != twice
    build_megatron_order(indexed, [range(1)] * 3, weights, 20, 4, seed=5, cache=tmp_path / "cache")
    (path,) = (tmp_path / "cache").glob("*BlendedDataset-train-description.txt")
    key = json.loads(path.read_text())["key"]
    assert [float.fromhex(weight) for weight in key["weights"]] == twice


@pytest.mark.parametrize("num_samples", [None, 20, 10_000])
def test_a_blend_by_sizes_reads_one_epoch(num_samples: int | None, tmp_path: Path) -> None:
    files = [LENGTHS, [50, 50]]
    indexed = [IndexedDataset(write_counting(tmp_path / str(n), file, 1000 * n)) for n, file in enumerate(files)]
    dataset = build_megatron_order(indexed, [range(10), range(2)], None, num_samples, 4, seed=5)
    parts = [expected_samples(texts(file, 1000 * n), 4, None, 5) for n, file in enumerate(files)]
    sizes = [len(part) for part in parts]
    if num_samples is None:
        chosen, numbers = reference.exhaustive_blend(sizes)
    else:
        shares = (np.array(sizes, dtype=np.float64) / np.sum(np.array(sizes, dtype=np.float64))).tolist()
        chosen, numbers = reference.blend(shares, min(num_samples, sum(sizes)))
    assert len(dataset) == len(chosen) == min(num_samples or 10_000, sum(sizes))
    assert read(dataset, len(dataset)) == [parts[d][i] for d, i in zip(chosen, numbers, strict=True)]


def test_a_single_weight_asks_for_the_surplus(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", [81]))
    # One epoch has 20 samples: with the surplus a second one starts.
    weighted = build_megatron_order([indexed], [range(1)], [1.0], 20, 4, seed=5)
    plain = build_megatron_order([indexed], [range(1)], None, 20, 4, seed=5)
    assert (len(weighted), len(plain)) == (20, 20)
    assert read(weighted, 20) == expected_samples(texts([81]), 4, 21, 5)[:20]
    assert read(plain, 20) == expected_samples(texts([81]), 4, 20, 5)
    wide = build_megatron_order([indexed], [range(1)], [1.0], 20, 4, seed=5, surplus=1.5)
    assert read(wide, 20) == expected_samples(texts([81]), 4, 50, 5)[:20]


def test_the_order_ends(tmp_path: Path) -> None:
    indexed = [IndexedDataset(write_counting(tmp_path / name, [81])) for name in "ab"]
    alone = build_megatron_order(indexed[:1], [range(1)], None, 20, 4, seed=5)
    blend = build_megatron_order(indexed, [range(1)] * 2, [1, 1], 20, 4, seed=5, split_name="valid")
    with pytest.raises(
        DataError, match=r"sample 20 of the train data, .* ordered 20.*--train-iters or --train-samples"
    ):
        alone[20]
    with pytest.raises(DataError, match=r"sample 20 of the valid data.*--eval-iters"):
        blend[20]
    for dataset in (alone, blend):
        with pytest.raises(IndexError):
            dataset[-1]


def test_end_of_document_in_the_loss_mask(tmp_path: Path) -> None:
    indexed = IndexedDataset(write(tmp_path / "a", [[1, 2, 99, 3, 99, 4, 5, 6, 99]]))
    options = {"num_samples": None, "sequence_length": 8, "seed": 0}
    masked = build_megatron_order([indexed], [range(1)], None, masked_token=99, **options)[0]
    assert masked["tokens"].tolist() == [1, 2, 99, 3, 99, 4, 5, 6]
    assert masked["loss_mask"].tolist() == [1, 1, 0, 1, 0, 1, 1, 1]
    plain = build_megatron_order([indexed], [range(1)], None, **options)[0]
    assert plain["loss_mask"].tolist() == [1.0] * 8


def test_a_last_partial_sample_is_padded(tmp_path: Path) -> None:
    indexed = IndexedDataset(write(tmp_path / "a", [[1, 2, 3, 4, 5, 6, 7]]))
    dataset = build_megatron_order([indexed], [range(1)], None, None, 4, 0, "valid", drop_last_partial=False)
    assert len(dataset) == 2
    whole, partial = sorted((dataset[i] for i in range(2)), key=lambda sample: sample["tokens"][0])
    assert (whole["tokens"].tolist(), whole["labels"].tolist()) == ([1, 2, 3, 4], [2, 3, 4, 5])
    assert (partial["tokens"].tolist(), partial["labels"].tolist()) == ([5, 6, 7, 0], [6, 7, 0, 0])
    assert partial["loss_mask"].tolist() == [1, 1, 0, 0]
    # Labels equal to the padding id do not count anywhere.
    padded = build_megatron_order([indexed], [range(1)], None, None, 4, 0, "valid", drop_last_partial=False, pad=3)
    whole = min((padded[i] for i in range(2)), key=lambda sample: sample["labels"][-1] == 0)
    assert (whole["labels"].tolist(), whole["loss_mask"].tolist()) == ([2, 0, 4, 5], [1, 0, 1, 1])


def test_places_past_32_bits() -> None:
    size, length = 2**31 - 1, 10**6  # C46
    dataset = build_megatron_order([FakeIndexed([size] * 6)], [range(6)], None, None, length, seed=3)
    assert len(dataset) == (6 * size - 1) // length
    order = dataset.order
    for index in (0, len(dataset) // 2, len(dataset) - 1, int(order.shuffle_index.argmax())):
        entry, offset = divmod(int(order.shuffle_index[index]) * length, size)
        first = (int(order.document_index[entry]) * size + offset) % 1000
        assert dataset[index]["tokens"][:5].tolist() == [(first + i) % 1000 for i in range(5)]


def test_too_few_tokens(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", [5, 3, 0]))
    sentence = r"/a: the valid split has 8 tokens in 3 sequences, but one sample needs 9 \(--seq-length 8"
    with pytest.raises(DataError, match=sentence):
        build_megatron_order([indexed], [range(3)], None, None, 8, 0, "valid")
    with pytest.raises(DataError, match=r"/a: the test split has 0 tokens in 1 sequences"):
        build_megatron_order([indexed], [range(2, 3)], None, 10, 8, 0, "test")
    # Any number of samples is reached by repetition.
    assert len(build_megatron_order([indexed], [range(3)], None, 10, 8, 0)) == 10


def test_weights_need_a_number_of_samples(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", [50]))
    with pytest.raises(ConfigError, match="give one weight per data set, and a number of samples"):
        build_megatron_order([indexed], [range(1)], [1.0], None, 8, 0)
    with pytest.raises(ConfigError, match="a blend of 1 data sets with 2 weights"):
        build_megatron_order([indexed], [range(1)], [1.0, 2.0], 5, 8, 0)


def test_a_blend_that_draws_too_much(tmp_path: Path) -> None:
    indexed = [IndexedDataset(write_counting(tmp_path / str(n), [41])) for n in range(21)]
    # Each of the twenty small shares is rounded up to a sample, so the blend has 29 samples instead of 10, and takes
    # nine tenths of them from the first file.
    weights = [0.9, *[0.005] * 20]
    with pytest.raises(
        DataError, match=r"/0: the blend draws 26 samples .* which has only 10; .*mid-level-dataset-surplus"
    ):
        build_megatron_order(indexed, [range(1)] * 21, weights, 10, 4, 0)
    assert len(build_megatron_order(indexed, [range(1)] * 21, weights, 10, 4, 0, surplus=2.0)) == 29


def test_the_cache_serves_data_sets_and_blends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [LENGTHS, [50, 50]]
    indexed = [IndexedDataset(write_counting(tmp_path / str(n), file, 1000 * n)) for n, file in enumerate(files)]
    before = sorted(tmp_path.iterdir())
    call = {"weights": [1, 2], "num_samples": 33, "sequence_length": 4, "seed": 5, "threads": 2}
    plain = build_megatron_order(indexed, [range(10), range(2)], **call)
    assert sorted(tmp_path.iterdir()) == before
    stored = [
        read(build_megatron_order(indexed, [range(10), range(2)], cache=tmp_path / "cache", **call), 33)
        for _ in range(2)
    ]
    assert stored == [read(plain, 33)] * 2
    assert len(list((tmp_path / "cache").iterdir())) == 4 + 4 + 4
    assert capsys.readouterr().err == ""


def test_batches_of_a_loader(tmp_path: Path) -> None:
    indexed = IndexedDataset(write_counting(tmp_path / "a", LENGTHS))
    dataset = build_megatron_order([indexed], [range(10)], None, 30, 8, seed=7)
    expected = expected_samples(texts(LENGTHS), 8, 30, 7)
    loader = BatchLoader(dataset, 2, 1, 2, vocab_size=1000)
    batches = loader.step(8, 2)  # C31
    tokens = [row for batch in batches for row in batch["tokens"].tolist()]
    assert tokens == [expected[i][:-1] for i in (10, 11, 14, 15)]


def test_samples_wanted_of_each_split() -> None:
    common = {"global_batch_size": 8, "eval_interval": 100, "eval_iters": 10}
    assert samples_wanted(train_iters=250, **common) == (2000, 240, 80)
    assert samples_wanted(train_iters=99, **common) == (792, 80, 80)
    assert samples_wanted(train_iters=99, eval_batch_size=16, **common) == (792, 160, 160)
    assert samples_wanted(train_samples=2003, **common) == (2003, 240, 80)
