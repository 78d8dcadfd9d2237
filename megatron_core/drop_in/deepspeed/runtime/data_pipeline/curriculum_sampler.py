"""The section ``data_efficiency.data_sampling.curriculum_learning``: samples whose difficulty grows with the steps.

The random numbers, and so the samples of each step, are those of DeepSpeed's ``DeepSpeedDataSampler``.
"""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deepspeed.runtime.data_pipeline.curriculum_scheduler import CurriculumScheduler
from megatron_core.datasets.indexed import HEADER, MAGIC, VERSION
from megatron_core.errors import ConfigError, quoted

SECTION = "data_efficiency.data_sampling.curriculum_learning"
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<u2", 7: "<u4", 8: "<u8"}
"""Codes in index files; those above 5 mean other types in Megatron-LM's."""


def read_rows(key: str, prefix: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return all numbers in ``prefix.bin`` and ``prefix.idx`` of DeepSpeed's analyzer, and the length of each row."""
    try:
        index = Path(f"{prefix}.idx").read_bytes()
        magic, version, code, rows, _ = HEADER.unpack_from(index)
        lengths = np.frombuffer(index, "<i4", rows, HEADER.size)
        numbers = np.memmap(f"{prefix}.bin", DTYPES[code], "r")
        is_complete = lengths.min(initial=0) >= 0 and lengths.sum(dtype=np.int64) == len(numbers)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigError(
            f"{key}={quoted(prefix)} cannot be read: {error}; make it with DeepSpeed's analyzer"
        ) from error
    if (magic, version) != (MAGIC, VERSION) or not is_complete:
        raise ConfigError(
            f"{key}={quoted(prefix)} is not an index of DeepSpeed's analyzer, or incomplete; make it again"
        )
    return numbers, lengths


class Metric:
    """A measure of difficulty: its schedule, and the samples by difficulty unless it only has a schedule."""

    def __init__(self, name: str, section: Mapping[str, Any], samples: int) -> None:
        path = f"{SECTION}.curriculum_metrics.{name}"
        kind = section.get("difficulty_type")
        if kind not in ("value", "percentile"):
            raise ConfigError(f"{path}.difficulty_type={quoted(kind)} must be 'value' or 'percentile'")
        self.schedule = CurriculumScheduler(section)
        self.is_percentile = kind == "percentile"
        self.largest = section["max_difficulty"]
        self.selects = section.get("clustering_type") != "single_cluster"
        if not self.selects:
            return
        key = f"{path}.index_to_sample_path"
        self.samples, lengths = read_rows(key, section.get("index_to_sample_path"))
        if not 0 <= self.samples.min() <= self.samples.max() < samples:
            raise ConfigError(f"{key} names samples outside of the {samples} of training_data; analyze these data")
        if not self.is_percentile:
            key = f"{path}.index_to_metric_path"
            values, _ = read_rows(key, section.get("index_to_metric_path"))
            if len(values) != len(lengths):
                raise ConfigError(f"{key} has {len(values)} values for {len(lengths)} rows of samples; analyze again")
            self.values = np.repeat(values, lengths)

    def between(self, previous: int | None, difficulty: int) -> np.ndarray:
        """Return the samples above the difficulty ``previous``, up to ``difficulty``."""
        if self.is_percentile:
            share = len(self.samples) // self.largest
            stop = len(self.samples) if difficulty == self.largest else share * difficulty
            return np.array(self.samples[share * (previous or 0) : stop])
        chosen = self.values <= difficulty
        if previous is not None:
            chosen &= self.values > previous
        return np.array(self.samples[chosen])


class CurriculumSampler:
    """Yields the samples of each micro-batch of one data-parallel rank; every rank draws whole batches.

    A new iteration continues after the last one. Errors: ``ConfigError`` for a wrong section or file.
    """

    def __init__(
        self, section: Mapping[str, Any], samples: int, sizes: tuple[int, int], place: tuple[int, int], drop_last: bool
    ) -> None:
        """``sizes``: of a micro-batch, and their number in a step; ``place``: data-parallel index and size."""
        sampling = section["data_sampling"]
        metrics = sampling["curriculum_learning"].get("curriculum_metrics")
        if not isinstance(metrics, Mapping) or not metrics or not all(isinstance(m, Mapping) for m in metrics.values()):
            raise ConfigError(f"{SECTION}.curriculum_metrics must be an object of metrics, each an object")
        self.metrics = {name: Metric(name, values, samples) for name, values in metrics.items()}
        self.samples, self.total = samples, samples * (sampling.get("num_epochs") or 1000)
        self.workers = sampling.get("num_workers") or 0
        self.rank, self.ranks = place
        self.together, self.drop_last = sizes[0] * self.ranks, drop_last
        self.batch_size = self.together * sizes[1]
        seed = section.get("seed")
        self.random = np.random.default_rng(1234 if seed is None else seed)
        self.difficulties: dict[str, int] = {}
        self.clusters: list[np.ndarray] = []
        self.positions: list[int] = []
        self.batch: list[int] = []
        self.step = self.consumed = 0

    def __len__(self) -> int:
        return int(self.total)

    def __iter__(self) -> Iterator[list[int]]:
        least = self.together if self.drop_last else self.ranks  # an incomplete micro-batch has a sample for each rank
        while self.consumed <= self.total:
            if not self.batch:
                self.batch = self._next_batch()
                if len(self.batch) < least:
                    raise ConfigError(
                        f"{SECTION}: too few samples have a difficulty up to {self.difficulties} for a batch of "
                        f"{self.batch_size} on {self.ranks} ranks; raise min_difficulty"
                    )
            micro, self.batch = self.batch[: self.together], self.batch[self.together :]
            if len(micro) >= least:
                start, stop = (round(rank * len(micro) / self.ranks) for rank in (self.rank, self.rank + 1))
                yield micro[start:stop]
                self.consumed += len(micro)

    def advance(self, steps: int) -> None:
        """Continue after ``steps`` steps, as a checkpoint does."""
        while self.step < steps:
            self.consumed += len(self._next_batch())
            self.batch = []

    def state_dict(self) -> dict[str, Any]:
        """State that ``set_data_post_process_func`` gives to its function."""
        state = {"batch": self.batch, "consumed_samples": self.consumed, "curriculum_step": self.step}
        return {**state, "current_difficulties": self.difficulties}

    def _next_batch(self) -> list[int]:
        self.step += 1
        previous = dict(self.difficulties)
        self.difficulties = {name: int(m.schedule.update_difficulty(self.step)) for name, m in self.metrics.items()}
        if self.difficulties != previous:
            self._add_cluster(previous)
        if not self.clusters:
            return []
        sizes = [len(cluster) for cluster in self.clusters]
        shares = [size / sum(sizes) for size in sizes]
        chosen = self.random.choice(len(sizes), self.batch_size, replace=True, p=shares)
        batch = [
            sample
            for number, count in enumerate(np.bincount(chosen, minlength=len(sizes)))
            for sample in self._take(number, int(count))
        ]
        self.random.shuffle(batch)
        return batch

    def _add_cluster(self, previous: Mapping[str, int]) -> None:
        """Add the samples that the new difficulties include, in a random order."""
        selecting = {name: metric for name, metric in self.metrics.items() if metric.selects}
        cluster = np.arange(0 if self.clusters or len(selecting) == 1 else self.samples)
        if len(selecting) == 1:
            [(name, metric)] = selecting.items()
            cluster = metric.between(previous.get(name), self.difficulties[name])
        elif selecting:
            cluster = np.arange(self.samples)
            for name, metric in selecting.items():
                cluster = np.intersect1d(cluster, metric.between(None, self.difficulties[name]), assume_unique=True)
            for other in self.clusters:
                cluster = np.setdiff1d(cluster, other, assume_unique=True)
        if len(cluster):
            self.random.shuffle(cluster)
            self.clusters.append(cluster)
            self.positions.append(0)

    def _take(self, number: int, count: int) -> list[int]:
        """Take the next ``count`` samples of a cluster, which begins again in a new order."""
        start = self.positions[number]
        samples = self.clusters[number][start : start + count].tolist()
        self.positions[number] += count
        if len(samples) < count:
            missing = count - len(samples)
            self.random.shuffle(self.clusters[number])
            samples += self.clusters[number][:missing].tolist()
            self.positions[number] = missing
        return list(samples)
