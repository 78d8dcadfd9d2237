"""Time the construction of sample orders.

Megatron's order: one file of 10^6 documents, read three times in samples of 2,048 tokens, and blends of 10^6 samples.
The keyed order: 1,000 files of 10^6 samples each, opened. Prints medians and appends them to benchmarks/results.csv.

python -m benchmarks.bench_data_order
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import tyro

from benchmarks.results import Row, append
from megatron_core.config import DataConfig
from megatron_core.datasets import build_datasets, get_bin_path, get_idx_path
from megatron_core.features.megatron_order.blend_index import build_blend_index, normalize
from megatron_core.features.megatron_order.order import OrderOptions, build_order, build_sample_index, count_samples
from megatron_core.preprocess.builder import TokenWriter


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the building of indices."""

    documents: int = 10**6
    """Number of documents of the file, of 1 to 1,330 tokens each."""
    epochs: int = 3
    """Number of epochs."""
    sequence_length: int = 2048
    """Tokens per sample."""
    samples: int = 10**6
    """Samples of a blend."""
    data_sets: tuple[int, ...] = (2, 4, 16, 100, 1000)
    """Numbers of data sets in the blends."""
    repeats: int = 5
    """Number of measurements."""


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """The median of the times that ``action`` takes."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def open_keyed(folder: Path, files: int, samples: int, length: int) -> Callable[[], object]:
    """Return a function that opens ``files`` sparse files with the given number of samples each and reads the last
    sample of an epoch."""
    prefixes = tuple(str(folder / f"part{number}") for number in range(files))
    tokens = samples * length + 1
    for prefix in prefixes:
        writer = TokenWriter(get_bin_path(prefix), np.uint16)
        writer.note_sequences(np.array([tokens]))
        writer.end_documents(np.array([1]))
        writer.finalize(get_idx_path(prefix))
        os.truncate(get_bin_path(prefix), 2 * tokens)
    data = DataConfig(data_path=prefixes, seq_length=length, split="1")
    return lambda: build_datasets(data, seed=1).train[files * samples - 1]


def measure(settings: Settings) -> Iterator[tuple[str, float]]:
    """Names of the measurements and their median seconds."""
    length, repeats = settings.sequence_length, settings.repeats
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 1331, settings.documents).astype(np.int32)
    documents = np.tile(np.arange(settings.documents, dtype=np.int32), settings.epochs)
    rng.shuffle(documents)
    samples = count_samples(settings.epochs * int(sizes.sum(dtype=np.int64)), length, extra_tokens=1)
    seconds = median_seconds(lambda: build_sample_index(sizes, documents, length, samples), repeats)
    yield f"sample index, {len(documents):,} documents, {samples:,} samples", seconds
    options = OrderOptions(length, samples, seed=1)
    seconds = median_seconds(lambda: build_order(sizes, range(settings.documents), options), repeats)
    yield "document, sample and shuffle index of these", seconds
    for number in settings.data_sets:
        weights = normalize((rng.random(number) + 0.01).tolist())
        seconds = median_seconds(lambda weights=weights: build_blend_index(weights, settings.samples), repeats)
        yield f"blend of {number:,} data sets, {settings.samples:,} samples", seconds
    with TemporaryDirectory() as folder:
        seconds = median_seconds(open_keyed(Path(folder), 1000, 10**6, 64), repeats)
        yield "keyed order, 1,000 files of 1,000,000 samples", seconds


def main() -> int:
    """Measure, print, append."""
    rows = []
    for name, seconds in measure(tyro.cli(Settings, description=__doc__)):
        print(f"{name}: {seconds:.3f} s", flush=True)
        rows.append(Row(name, seconds, "s"))
    append("bench_data_order", rows, peer=f"numpy {np.__version__}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
