"""How long the indices of Megatron's data order take to build: of one file, and of blends.

One file of 10^6 documents, read three times in samples of 2,048 tokens; blends of 10^6 samples. Prints medians.

    python -m benchmarks.bench_data_order
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tyro

from megatron_core.datasets.megatron_order.blend_index import build_blend_index, normalize
from megatron_core.datasets.megatron_order.order import OrderOptions, build_order
from megatron_core.datasets.megatron_order.sample_index import build_sample_index, count_samples


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Time the building of indices."""

    documents: int = 10**6
    """Documents of the file, of 1 to 1,330 tokens."""
    epochs: int = 3
    """How often they are read."""
    sequence_length: int = 2048
    """Tokens of a sample."""
    samples: int = 10**6
    """Samples of a blend."""
    data_sets: tuple[int, ...] = (2, 4, 16, 100, 1000)
    """Numbers of data sets of the blends."""
    repeats: int = 5
    """How often each is timed."""


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    """The median of the times that ``action`` takes."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def main() -> int:
    """Measure and print."""
    settings = tyro.cli(Settings, description=__doc__)
    length, repeats = settings.sequence_length, settings.repeats
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 1331, settings.documents).astype(np.int32)
    documents = np.tile(np.arange(settings.documents, dtype=np.int32), settings.epochs)
    rng.shuffle(documents)
    samples = count_samples(settings.epochs * int(sizes.sum(dtype=np.int64)), length, extra_tokens=1)
    seconds = median_seconds(lambda: build_sample_index(sizes, documents, length, samples), repeats)
    print(f"sample index, {len(documents):,} documents, {samples:,} samples: {seconds:.3f} s")
    options = OrderOptions(length, samples, seed=1)
    seconds = median_seconds(lambda: build_order(sizes, range(settings.documents), options), repeats)
    print(f"document, sample and shuffle index: {seconds:.3f} s")
    for number in settings.data_sets:
        weights = normalize((rng.random(number) + 0.01).tolist())
        seconds = median_seconds(lambda weights=weights: build_blend_index(weights, settings.samples), repeats)
        print(f"blend of {number:,} data sets, {settings.samples:,} samples: {seconds:.3f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
