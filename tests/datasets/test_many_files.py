"""1,000 files and 10^9 samples: memory and reads do not grow with either number."""

import tracemalloc
from pathlib import Path

import pytest

from megatron_core.config import DataConfig
from megatron_core.datasets import build_datasets, get_bin_path, get_idx_path
from tests.datasets.files import index_by_hand

FILES, SAMPLES, LENGTH = 1000, 10**6, 64


def sparse_file(prefix: Path) -> str:
    """A sparse file of 10^6 samples in 5 documents."""
    lengths = [SAMPLES * LENGTH // 5] * 4 + [SAMPLES * LENGTH // 5 + 1]
    Path(get_idx_path(str(prefix))).write_bytes(index_by_hand(lengths, 2, range(6), code=8))
    with open(get_bin_path(str(prefix)), "wb") as file:
        file.truncate(2 * sum(lengths))
    return str(prefix)


@pytest.fixture(scope="module")
def prefixes(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The prefixes of all files."""
    folder = tmp_path_factory.mktemp("many")
    return tuple(sparse_file(folder / f"part{i}") for i in range(FILES))


def test_little_memory_whatever_the_number_of_samples(prefixes: tuple[str, ...]) -> None:
    tracemalloc.start()
    train = build_datasets(DataConfig(data_path=prefixes, seq_length=LENGTH, split="1"), seed=1).train
    for index in (0, 1, 10**9 - 1, 10**12):
        assert train[index]["tokens"].shape == (LENGTH,)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert train.samples_per_epoch == FILES * SAMPLES
    # One byte per sample would be 1,000 MB. Expected: 1,000 open files, and the blend's tables of 65,536 slots.
    assert peak < 10e6
