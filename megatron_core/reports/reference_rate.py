"""FLOP/s of a rank's matrix products, the reference of utilisation."""

import os
import time
from dataclasses import dataclass
from typing import Any

import torch

MEASURED = "measured at the start from iteration "
"""Prefix of the source of a measured rate."""


@dataclass(frozen=True)
class ReferenceRate:
    """The reference rate of utilisation; a run stores it, and its restarts use it again.

    flops: FLOP/s of a rank. device: its name and the number of ranks. source: origin of the rate.
    """

    flops: float
    device: str
    dtype: str
    source: str

    @classmethod
    def of(cls, record: Any) -> "ReferenceRate | None":
        """Inverse of ``asdict``; None for other values, such as records of earlier releases."""
        try:
            rate = cls(**record)
        except TypeError:
            return None
        texts = (rate.device, rate.dtype, rate.source)
        is_whole = isinstance(rate.flops, float) and rate.flops > 0 and all(isinstance(text, str) for text in texts)
        return rate if is_whole else None

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.3g} TFLOP/s of a rank in {self.dtype} ({self.device}), {self.source}"


_LEAST_PRODUCTS = 8
"""On busy cores the first products may all be interrupted: of two, the rate was 1 % of the true one."""


def measure_product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.03) -> float:
    """Measure FLOP/s: the fastest of at least eight products of square matrices, for at least ``seconds``.

    Matrices have 8192 rows on a GPU, 512 on a CPU. The fastest product was not interrupted by other ranks of the same
    cores; ``share_of_cores`` accounts for them.
    """
    side = 8192 if device.type == "cuda" else 512
    # Products of equal numbers take less power, so that a GPU runs them faster than those of a training.
    a = torch.arange(side**2, dtype=torch.float32, device=device).sin_().to(dtype).view(side, side)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)  # loads libraries and selects kernels
    fastest, end, products = float("inf"), time.perf_counter() + seconds, 0
    while products < _LEAST_PRODUCTS or time.perf_counter() < end:
        wait_for_device(device)
        began = time.perf_counter()
        torch.mm(a, a, out=out)
        wait_for_device(device)
        fastest, products = min(fastest, time.perf_counter() - began), products + 1
    return 2.0 * side**3 / fastest


def share_of_cores(ranks: int, threads: int, cores: int | None = None) -> float:
    """Share of its threads' time that a rank has if ``ranks`` ranks of a host compute with ``threads`` threads each:
    1 unless they are more than the ``cores`` (default: of this process)."""
    available = cores or (len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    return min(available / (ranks * threads), 1.0)


def wait_for_device(device: torch.device) -> None:
    """Wait until a GPU has computed everything."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
