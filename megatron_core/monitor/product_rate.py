"""FLOP/s of matrix products on this rank, the reference of utilisation."""

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
            found = cls(**record)
        except TypeError:
            return None
        texts = (found.device, found.dtype, found.source)
        is_whole = isinstance(found.flops, float) and found.flops > 0 and all(isinstance(text, str) for text in texts)
        return found if is_whole else None

    @property
    def is_measured(self) -> bool:
        """Whether the rate was measured, not set with ``--peak-tflops``."""
        return self.source.startswith(MEASURED)

    def __str__(self) -> str:
        return f"{self.flops / 1e12:.3g} TFLOP/s of a rank in {self.dtype} ({self.device}), {self.source}"


def measure_product_rate(device: torch.device, dtype: torch.dtype, seconds: float = 0.03) -> float:
    """Measure FLOP/s: the fastest of at least two products of square matrices within ``seconds``.

    Matrices have 8192 rows on a GPU, 512 on a CPU. All ranks of a job measure at the same time, so that ranks on the
    same cores share them as they do in training.
    """
    side = 8192 if device.type == "cuda" else 512
    a = torch.ones(side, side, dtype=dtype, device=device)
    out = torch.empty_like(a)
    torch.mm(a, a, out=out)  # loads libraries and selects kernels
    fastest, end = float("inf"), time.perf_counter() + seconds
    while fastest == float("inf") or time.perf_counter() < end:
        _wait(device)
        began = time.perf_counter()
        torch.mm(a, a, out=out)
        _wait(device)
        fastest = min(fastest, time.perf_counter() - began)
    return 2.0 * side**3 / fastest


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
